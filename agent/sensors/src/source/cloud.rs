//! The cloud's announcements for this machine, from its metadata server.
//!
//! The firmware (DMI, in sysfs) shows which cloud it is: other machines send no request, and no name is ever resolved. A
//! separate task follows each key of the server; together they hold the last announcements.

mod amazon;
mod azure;
mod google;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use mainstay_health::host::cloud::{CloudSample, Notice};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

/// The asset tag of the chassis in the firmware of every Azure machine; other machines on Hyper-V have another one.
const AZURE_ASSET_TAG: &str = "7783-7084-3265-9085-8269-3286-77";

/// A cloud with a metadata server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// Google Compute Engine.
    Google,
    /// Amazon EC2.
    Amazon,
    /// Microsoft Azure.
    Azure,
}

impl Provider {
    /// The cloud of this machine, from its firmware; none if it is none of these clouds.
    pub fn by_firmware(sys: &Path) -> Option<Provider> {
        let dmi =
            |name: &str| std::fs::read_to_string(sys.join("class/dmi/id").join(name)).unwrap_or_default();
        match () {
            () if dmi("product_name").trim() == "Google Compute Engine" => Some(Provider::Google),
            () if dmi("sys_vendor").trim() == "Amazon EC2" => Some(Provider::Amazon),
            () if dmi("chassis_asset_tag").trim() == AZURE_ASSET_TAG => Some(Provider::Azure),
            () => None,
        }
    }

    /// Its name for people.
    fn name(self) -> &'static str {
        match self {
            Provider::Google => "Google Compute Engine",
            Provider::Amazon => "Amazon EC2",
            Provider::Azure => "Microsoft Azure",
        }
    }
}

/// The address that all clouds use; it needs no name server.
pub const USUAL_ADDRESS: &str = "169.254.169.254:80";

/// How long the first sample waits for all keys to answer.
const FIRST_WAIT: Duration = Duration::from_secs(3);

/// Answers of keys that may wait to be read.
const MAX_QUEUED_ANSWERS: usize = 16;

/// The announcements of the cloud.
#[derive(Debug)]
pub struct CloudSource {
    provider: Provider,
    /// Runs the tasks that follow the keys; dropping it ends them.
    runtime: Runtime,
    news: mpsc::Receiver<CloudUpdate>,
    /// The last answer of each key.
    keys: BTreeMap<&'static str, Result<Vec<Notice>, String>>,
    /// How many keys there are.
    expected: usize,
    looked: bool,
}

/// The new answer of a key.
#[derive(Debug)]
struct CloudUpdate {
    key: &'static str,
    notices: Result<Vec<Notice>, String>,
}

impl CloudSource {
    /// Starts to follow the metadata server at `address`, as `host:port`.
    ///
    /// # Errors
    /// The kernel gives no threads or descriptors.
    pub fn new(provider: Provider, address: &str) -> io::Result<CloudSource> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("cloud keys")
            .enable_all()
            .build()?;
        let (sender, news) = mpsc::channel(MAX_QUEUED_ANSWERS);
        let expected = match provider {
            Provider::Google => google::follow(&runtime, address, &sender),
            Provider::Amazon => amazon::follow(&runtime, address, &sender),
            Provider::Azure => azure::follow(&runtime, address, &sender),
        };
        Ok(CloudSource { provider, runtime, news, keys: BTreeMap::new(), expected, looked: false })
    }

    /// All announcements received so far. Only the first call waits for the server, and for a limited time.
    pub fn sample(&mut self) -> CloudSample {
        if !std::mem::replace(&mut self.looked, true) {
            let all = async {
                while self.keys.len() < self.expected {
                    let Some(news) = self.news.recv().await else { return };
                    self.keys.insert(news.key, news.notices);
                }
            };
            // Keys that have not answered by then are reported as such.
            let _ = self.runtime.block_on(async { tokio::time::timeout(FIRST_WAIT, all).await });
        }
        while let Ok(news) = self.news.try_recv() {
            self.keys.insert(news.key, news.notices);
        }
        self.read_sample()
    }

    fn read_sample(&self) -> CloudSample {
        let mut notices = Vec::new();
        let mut failed = (self.keys.len() < self.expected).then(|| "no answer yet".to_owned());
        for (key, notices_of_key) in &self.keys {
            match notices_of_key {
                Ok(announced) => notices.extend(announced.iter().cloned()),
                Err(why) => failed = Some(format!("{key}: {why}")),
            }
        }
        let notices = match failed {
            // An unreadable key does not hide what another key announces.
            Some(why) if notices.is_empty() => Err(why),
            _ => Ok(notices),
        };
        CloudSample { provider: self.provider.name().to_owned(), notices }
    }
}
