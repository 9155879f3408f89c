//! Refuses clients without the job's secret.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::header::AUTHORIZATION;
use tonic::codegen::http::{Extensions, Request, Response};
use tonic::transport::server::{TcpConnectInfo, TlsConnectInfo};

/// A wrong token is refused after this time: whoever guesses gets few answers.
const PAUSE: Duration = Duration::from_millis(500);

/// Sources of wrong tokens that are logged. Further ones are refused without a line.
const LOGGED: usize = 64;

/// Passes on the requests of clients with the token.
#[derive(Clone, Debug)]
pub(super) struct Guard {
    token: Option<Arc<str>>,
    logged: Arc<Mutex<BTreeSet<IpAddr>>>,
}

impl Guard {
    /// Without a token, all clients are accepted.
    pub(super) fn new(token: Option<&str>) -> Guard {
        Guard { token: token.map(Arc::from), logged: Arc::default() }
    }

    fn accepts<B>(&self, request: &Request<B>) -> bool {
        let Some(token) = &self.token else { return true };
        let shown = request.headers().get(AUTHORIZATION).map(|value| value.as_bytes());
        let shown = shown.and_then(|value| value.strip_prefix(b"Bearer ")).unwrap_or_default();
        same(shown, token.as_bytes())
    }

    /// Logs the first wrong token of each address. Returns whether it did.
    fn log(&self, source: Option<IpAddr>) -> bool {
        let Some(source) = source else { return false };
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.len() >= LOGGED || !logged.insert(source) {
            return false;
        }
        tracing::warn!(%source, "a client of the coordination store without the secret of this job is refused, now and from now on");
        true
    }
}

fn source(extensions: &Extensions) -> Option<IpAddr> {
    let plain = || extensions.get::<TcpConnectInfo>().and_then(TcpConnectInfo::remote_addr);
    let encrypted = extensions.get::<TlsConnectInfo<TcpConnectInfo>>();
    let address = encrypted.and_then(|tls| tls.get_ref().remote_addr()).or_else(plain)?;
    Some(address.ip().to_canonical())
}

/// Compares in constant time, independent of where they differ.
fn same(one: &[u8], other: &[u8]) -> bool {
    one.len() == other.len() && one.iter().zip(other).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

impl<S> tower::Layer<S> for Guard {
    type Service = Guarded<S>;

    fn layer(&self, inner: S) -> Guarded<S> {
        Guarded { inner, guard: self.clone() }
    }
}

/// A service behind a guard.
#[derive(Clone, Debug)]
pub(super) struct Guarded<S> {
    inner: S,
    guard: Guard,
}

impl<S, B> tower::Service<Request<B>> for Guarded<S>
where
    S: tower::Service<Request<B>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        if self.guard.accepts(&request) {
            return Box::pin(self.inner.call(request));
        }
        self.guard.log(source(request.extensions()));
        Box::pin(async {
            tokio::time::sleep(PAUSE).await;
            let refused = "etcdserver: invalid auth token: this store serves another job";
            Ok(Status::unauthenticated(refused).into_http())
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "in a test, a panic is the report")]

    use std::net::Ipv4Addr;

    use tokio::time::Instant;
    use tower::{Layer, Service, service_fn};

    use super::*;

    /// Whether the guard lets a request with this header pass, and how long its answer took.
    async fn ask(guard: &Guard, header: Option<&str>) -> (bool, Duration) {
        let inner =
            service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new(Body::default())) });
        let mut request = Request::new(());
        if let Some(header) = header {
            request.headers_mut().insert(AUTHORIZATION, header.parse().unwrap());
        }
        let asked = Instant::now();
        let answer = guard.layer(inner).call(request).await.unwrap();
        (!answer.headers().contains_key(Status::GRPC_STATUS), asked.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn a_wrong_token_is_refused_after_a_pause_and_the_right_one_is_not_delayed() {
        let guard = Guard::new(Some("secret"));
        assert_eq!(ask(&guard, Some("Bearer secret")).await, (true, Duration::ZERO));
        for wrong in [None, Some("Bearer "), Some("Bearer secreT"), Some("Bearer secrets"), Some("secret")] {
            let (is_accepted, took) = ask(&guard, wrong).await;
            assert!(!is_accepted && took >= PAUSE, "{wrong:?}: {is_accepted} {took:?}");
        }
        assert_eq!(ask(&Guard::new(None), None).await, (true, Duration::ZERO));
    }

    #[test]
    fn each_source_of_wrong_tokens_is_logged_once() {
        let guard = Guard::new(Some("secret"));
        let from = |number: usize| Some(IpAddr::V4(Ipv4Addr::from_bits(number as u32)));
        assert!(guard.log(from(1)) && !guard.log(from(1)) && !guard.log(None));
        let logged = (2..1000).filter(|number| guard.log(from(*number))).count();
        assert_eq!(logged, LOGGED - 1);
    }
}
