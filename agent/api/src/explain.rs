//! `mainstay.v1.ExplainService`: components, events, codes and failures, explained.

use mainstay_health::hardware::catalog::Catalog;
use mainstay_health::hardware::gpu::GpuView;
use mainstay_model::health::Component;
use mainstay_model::id::Incident;
use mainstay_model::redact::masked;
use mainstay_proto::v1::explain_request::Target;
use mainstay_proto::v1::explain_response::Report;
use mainstay_proto::v1::explain_service_server::ExplainService;
use mainstay_proto::v1::{ExplainRequest, ExplainResponse};
use mainstay_view::convert::failure;
use mainstay_view::convert::health::code_in;
use mainstay_view::explain;
use mainstay_view::incident_report::{self, IncidentReport};
use mainstay_view::node::NodeView;
use prost::Message;
use tonic::{Request, Response, Status};

use super::ReadSide;
use super::bounds;
use super::events::{MAX_PAGE_BYTES, of_failures, one};
use super::readers::Reader;
use super::refusal::{Reason, invalid};
use super::shares::Source;

/// The service.
pub(super) struct Explain(pub(super) ReadSide);

#[tonic::async_trait]
impl ExplainService for Explain {
    async fn explain(&self, request: Request<ExplainRequest>) -> Result<Response<ExplainResponse>, Status> {
        let reader = self.0.readers.reader(&request);
        let source = Source::from_connection(request.extensions());
        let target = request.into_inner().target;
        let target = target.ok_or_else(|| invalid("target", "name what to explain"))?;
        let share = self.0.bounds.answer(source, 2 * MAX_PAGE_BYTES).await?;
        let report = match target {
            Target::Component(name) => self.component(&name)?,
            Target::Cursor(cursor) => self.event(cursor, reader, source).await?,
            Target::Code(code) => {
                let meaning = code_in(&code).and_then(|code| explain::meaning(code, self.catalog()));
                Report::Code(
                    meaning
                        .ok_or_else(|| Reason::UNKNOWN_CODE.refuse("the catalog does not have this code"))?,
                )
            }
            Target::Failure(of) => {
                let report = self.0.failure(&of.job, of.incident.map(Incident), reader, source).await?;
                Report::Failure(failure::report(&of.job, &report, (self.0.clock)()))
            }
        };
        let answer = ExplainResponse { report: Some(report) };
        let bytes = answer.encoded_len();
        Ok(bounds::holding(answer, share, 2 * bytes))
    }
}

impl Explain {
    fn catalog(&self) -> Option<&Catalog> {
        self.0.catalog.as_deref()
    }

    fn component(&self, name: &str) -> Result<Report, Status> {
        let view = self.0.snapshots.view();
        let Some(component) = named(&view, name) else {
            return Err(Reason::UNKNOWN_COMPONENT.refuse(format!("there is no component {name:?} here")));
        };
        Ok(Report::Component(explain::component(&view, component, (self.0.clock)(), self.catalog())))
    }

    async fn event(&self, cursor: u64, reader: Reader, source: Source) -> Result<Report, Status> {
        let (entry, event) = one(&self.0, cursor, reader, source).await?;
        Ok(Report::Event(explain::event(&entry, event, self.catalog())))
    }
}

/// The component with this name, or the GPU with this address or UUID.
fn named<'a>(view: &'a NodeView, name: &str) -> Option<&'a Component> {
    let is_it = |gpu: &&GpuView| {
        let identity = gpu.reading.as_ref().and_then(|reading| reading.identity.as_ref());
        gpu.address.to_string() == name || identity.is_some_and(|identity| identity.uuid == name)
    };
    let gpu = || view.gpus.iter().find(is_it).map(|gpu| format!("gpu.{}", gpu.address));
    view.components.get(name).or_else(|| view.components.get(&gpu()?))
}

impl ReadSide {
    /// The report on a failure of a job.
    pub(super) async fn failure(
        &self,
        job: &str,
        incident: Option<Incident>,
        reader: Reader,
        source: Source,
    ) -> Result<IncidentReport, Status> {
        // The whole journal is read: by one caller of each source at a time.
        let _turn = self.bounds.whole_reads.take(source, 1).await;
        let entries = of_failures(&self.snapshots, job, reader).await?;
        let report = incident_report::from_entries(entries.iter(), incident).ok_or_else(|| {
            let which =
                incident.map_or("no failure".to_owned(), |incident| format!("no failure {}", incident.0));
            Reason::UNKNOWN_FAILURE.refuse(format!("the journal has {which} of job {job:?}"))
        })?;
        if reader != Reader::Masked {
            return Ok(report);
        }
        masked(&report)
            .map_err(|error| Reason::INTERNAL.refuse(format!("masking secrets of the report: {error}")))
    }
}
