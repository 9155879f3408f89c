//! What callers over TCP get who call a service for local users: a refusal that says where to ask, and an entry of the
//! journal.

use axum::Router;
use axum::extract::{Request, State};
use axum::response::Response;
use tokio::sync::mpsc;
use tonic::service::Routes;

use super::certificate::TcpCallerInfo;
use super::refusal::Reason;
use super::roles;
use mainstay_node::Input;

/// The services for local users.
const SERVICES: [&str; 3] =
    ["/mainstay.v1.CheckpointService/", "/mainstay.v1.LauncherService/", "/mainstay.v1.OperatorService/"];

/// Why a call over TCP is refused.
pub(super) const LOCAL_ONLY: &str = "this is asked for on the agent's Unix socket only";

/// The same routes; other calls of our services are refused.
pub(super) fn refusing(routes: Routes, inputs: Option<mpsc::Sender<Input>>) -> Routes {
    let others: Router = Router::new().fallback(refuse).with_state(inputs);
    routes.into_axum_router().fallback_service(others).into()
}

async fn refuse(State(inputs): State<Option<mpsc::Sender<Input>>>, request: Request) -> Response {
    let path = request.uri().path();
    let Some(call) = SERVICES.iter().find_map(|service| path.strip_prefix(service)) else {
        return super::not_served(request).await;
    };
    if let (Some(inputs), Some(caller)) = (inputs, request.extensions().get::<TcpCallerInfo>()) {
        roles::record(&inputs, caller.called_by(), call, LOCAL_ONLY, true);
    }
    Reason::UNIX_SOCKET_ONLY.refuse(format!("{call}: {LOCAL_ONLY}")).into_http()
}
