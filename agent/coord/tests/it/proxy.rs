//! A proxy between client and store that can cut connections or become silent.

use std::sync::Arc;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The treatment of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Open,
    /// New ones are accepted and closed at once; switching to it closes the existing ones.
    Closed,
    /// Bytes are neither forwarded nor answered.
    Silent,
}

/// Forwards its own port to that of a store.
pub struct Proxy {
    pub port: u16,
    way: Arc<watch::Sender<Way>>,
    task: JoinHandle<()>,
}

impl Proxy {
    pub async fn to(target: u16) -> Proxy {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (way, seen) = watch::channel(Way::Open);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(forward(client, target, seen.clone()));
            }
        });
        Proxy { port, way: Arc::new(way), task }
    }

    /// Cuts all connections; new ones are forwarded.
    pub fn cut(&self) {
        self.way.send_replace(Way::Closed);
        self.way.send_replace(Way::Open);
    }

    /// Cuts all connections and refuses new ones.
    pub fn close(&self) {
        self.way.send_replace(Way::Closed);
    }

    /// Keeps all connections open and forwards nothing.
    pub fn silence(&self) {
        self.way.send_replace(Way::Silent);
    }

    pub fn open(&self) {
        self.way.send_replace(Way::Open);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.way.send_replace(Way::Closed);
        self.task.abort();
    }
}

async fn forward(mut client: TcpStream, target: u16, mut way: watch::Receiver<Way>) {
    let now = *way.borrow_and_update();
    match now {
        Way::Closed => return,
        Way::Silent => {
            // Neither answer nor close until the mode changes.
            let _ = way.changed().await;
            return;
        }
        Way::Open => {}
    }
    let Ok(mut store) = TcpStream::connect(("127.0.0.1", target)).await else { return };
    tokio::select! {
        _ = copy_bidirectional(&mut client, &mut store) => {}
        _ = way.changed() => {
            if *way.borrow_and_update() == Way::Silent {
                let _ = way.changed().await;
            }
        }
    }
}
