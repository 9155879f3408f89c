//! The store's gRPC services: each passes a request to the thread that owns the store, and returns the answer.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

use super::store_thread::{Handle, Job};
use super::watchers::MAX_QUEUED_RESPONSES;
use crate::client::BUILTIN;
use crate::etcd::etcdserverpb as pb;
use pb::watch_request::RequestUnion;

type Answered<A> = Result<Response<A>, Status>;

/// All services of the built-in store.
#[derive(Clone)]
pub(super) struct Services {
    pub(super) store: Handle,
    /// The number of open keep-alive streams, and its maximum.
    pub(super) streams: Arc<AtomicUsize>,
    pub(super) most_streams: usize,
}

#[tonic::async_trait]
impl pb::kv_server::Kv for Services {
    async fn range(&self, request: Request<pb::RangeRequest>) -> Answered<pb::RangeResponse> {
        let question = request.into_inner();
        self.store.ask(move |store, _| store.range(&question)).await.map(Response::new)
    }

    async fn put(&self, request: Request<pb::PutRequest>) -> Answered<pb::PutResponse> {
        let question = request.into_inner();
        self.store.ask(move |store, _| store.put(question)).await.map(Response::new)
    }

    async fn delete_range(
        &self,
        request: Request<pb::DeleteRangeRequest>,
    ) -> Answered<pb::DeleteRangeResponse> {
        let question = request.into_inner();
        self.store.ask(move |store, _| store.delete_range(&question)).await.map(Response::new)
    }

    async fn txn(&self, request: Request<pb::TxnRequest>) -> Answered<pb::TxnResponse> {
        let question = request.into_inner();
        self.store.ask(move |store, _| store.txn(question)).await.map(Response::new)
    }

    async fn compact(&self, request: Request<pb::CompactionRequest>) -> Answered<pb::CompactionResponse> {
        let question = request.into_inner();
        self.store.ask(move |store, _| store.compact(&question)).await.map(Response::new)
    }
}

#[tonic::async_trait]
impl pb::lease_server::Lease for Services {
    async fn lease_grant(&self, request: Request<pb::LeaseGrantRequest>) -> Answered<pb::LeaseGrantResponse> {
        let question = request.into_inner();
        self.store.ask(move |store, now| store.grant(&question, now)).await.map(Response::new)
    }

    async fn lease_revoke(
        &self,
        request: Request<pb::LeaseRevokeRequest>,
    ) -> Answered<pb::LeaseRevokeResponse> {
        let question = request.into_inner();
        self.store.ask(move |store, _| store.revoke(&question)).await.map(Response::new)
    }

    type LeaseKeepAliveStream =
        Pin<Box<dyn Stream<Item = Result<pb::LeaseKeepAliveResponse, Status>> + Send>>;

    async fn lease_keep_alive(
        &self,
        request: Request<Streaming<pb::LeaseKeepAliveRequest>>,
    ) -> Answered<Self::LeaseKeepAliveStream> {
        let open = OpenStream::count(&self.streams, self.most_streams)?;
        let store = self.store.clone();
        let answers = request.into_inner().then(move |question| {
            let (store, _open) = (store.clone(), &open);
            async move {
                let id = question?.id;
                store.ask(move |store, now| Ok(store.keep_alive(id, now))).await
            }
        });
        Ok(Response::new(Box::pin(answers)))
    }

    async fn lease_time_to_live(
        &self,
        request: Request<pb::LeaseTimeToLiveRequest>,
    ) -> Answered<pb::LeaseTimeToLiveResponse> {
        let question = request.into_inner();
        let call = self.store.ask(move |store, now| Ok(store.time_to_live(&question, now)));
        call.await.map(Response::new)
    }
}

#[tonic::async_trait]
impl pb::watch_server::Watch for Services {
    type WatchStream = ReceiverStream<Result<pb::WatchResponse, Status>>;

    async fn watch(&self, request: Request<Streaming<pb::WatchRequest>>) -> Answered<Self::WatchStream> {
        let (answers, received) = mpsc::channel(MAX_QUEUED_RESPONSES);
        let closed = answers.clone();
        let stream = self.store.open(answers).await?;
        let store = self.store.clone();
        let mut requests = request.into_inner();
        tokio::spawn(async move {
            loop {
                let request = tokio::select! {
                    request = requests.message() => request,
                    () = closed.closed() => break,
                };
                let job = match request {
                    Ok(Some(request)) => match request.request_union {
                        Some(RequestUnion::CreateRequest(create)) => Job::Create(stream, create),
                        Some(RequestUnion::CancelRequest(cancel)) => Job::Cancel(stream, cancel.watch_id),
                        Some(RequestUnion::ProgressRequest(_)) => Job::Progress(stream),
                        None => continue,
                    },
                    // A client that sends no more requests may still read.
                    Ok(None) => {
                        closed.closed().await;
                        break;
                    }
                    Err(_) => break,
                };
                if store.send(job).is_err() {
                    break;
                }
            }
            let _ = tokio::task::spawn_blocking(move || store.send_surely(Job::Close(stream))).await;
        });
        Ok(Response::new(ReceiverStream::new(received)))
    }
}

#[tonic::async_trait]
impl pb::auth_server::Auth for Services {
    async fn authenticate(&self, _: Request<pb::AuthenticateRequest>) -> Answered<pb::AuthenticateResponse> {
        // The built-in store has one secret per job and no users.
        Err(Status::failed_precondition("etcdserver: authentication is not enabled"))
    }
}

#[tonic::async_trait]
impl pb::maintenance_server::Maintenance for Services {
    async fn status(&self, _: Request<pb::StatusRequest>) -> Answered<pb::StatusResponse> {
        let call = self.store.ask(|store, _| {
            let header = store.header();
            Ok(pb::StatusResponse {
                leader: header.member_id,
                header: Some(header),
                version: format!("{BUILTIN}-{}", env!("CARGO_PKG_VERSION")),
                db_size: i64::try_from(store.bytes()).unwrap_or(i64::MAX),
            })
        });
        call.await.map(Response::new)
    }
}

/// One open stream, counted until it is dropped.
struct OpenStream(Arc<AtomicUsize>);

impl OpenStream {
    fn count(streams: &Arc<AtomicUsize>, most: usize) -> Result<OpenStream, Status> {
        let open = OpenStream(Arc::clone(streams));
        if streams.fetch_add(1, Ordering::Relaxed) >= most {
            return Err(Status::resource_exhausted("etcdserver: too many requests"));
        }
        Ok(open)
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
