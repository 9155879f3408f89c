//! What the cloud announces for this machine, by its metadata server.
//!
//! Which cloud it is, the firmware says (DMI, in sysfs): on other machines nothing is asked, and no name is ever
//! resolved. Each key of the server is followed by a task of its own; together they are what was last told.

mod amazon;
mod azure;
mod google;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use mainstay_core::host::cloud::{CloudSample, Notice};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

/// What the firmware of every machine of Azure has as its chassis' asset tag; other machines on Hyper-V have another.
const AZURE_ASSET_TAG: &str = "7783-7084-3265-9085-8269-3286-77";

/// A cloud whose metadata server can be asked.
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
    /// Whose machine this is by its firmware; none if it is of none of these clouds.
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

/// The address that clouds have agreed on; it needs no name server.
pub const USUAL_ADDRESS: &str = "169.254.169.254:80";

/// How long the first look waits for all keys to answer.
const FIRST_WAIT: Duration = Duration::from_secs(3);

/// Answers of keys that may wait to be taken.
const QUEUE: usize = 16;

/// The announcements of the cloud.
#[derive(Debug)]
pub struct CloudSource {
    provider: Provider,
    /// Where the keys are followed, all the time; it ends with this.
    runtime: Runtime,
    news: mpsc::Receiver<News>,
    /// What each key last told.
    keys: BTreeMap<&'static str, Result<Vec<Notice>, String>>,
    /// How many keys there are.
    expected: usize,
    looked: bool,
}

/// What a key tells from now on.
#[derive(Debug)]
struct News {
    key: &'static str,
    reported: Result<Vec<Notice>, String>,
}

impl CloudSource {
    /// Follows the metadata server at `address`, as `host:port`, from now on.
    ///
    /// # Errors
    /// The kernel gives no threads or descriptors.
    pub fn new(provider: Provider, address: &str) -> io::Result<CloudSource> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("cloud keys")
            .enable_all()
            .build()?;
        let (sender, news) = mpsc::channel(QUEUE);
        let expected = match provider {
            Provider::Google => google::follow(&runtime, address, &sender),
            Provider::Amazon => amazon::follow(&runtime, address, &sender),
            Provider::Azure => azure::follow(&runtime, address, &sender),
        };
        Ok(CloudSource { provider, runtime, news, keys: BTreeMap::new(), expected, looked: false })
    }

    /// All that is announced as far as the server has told. Waits for it the first time only, and not for long.
    pub fn sample(&mut self) -> CloudSample {
        if !std::mem::replace(&mut self.looked, true) {
            let all = async {
                while self.keys.len() < self.expected {
                    let Some(news) = self.news.recv().await else { return };
                    self.keys.insert(news.key, news.reported);
                }
            };
            // Keys that have not answered by then are told of as such.
            let _ = self.runtime.block_on(async { tokio::time::timeout(FIRST_WAIT, all).await });
        }
        while let Ok(news) = self.news.try_recv() {
            self.keys.insert(news.key, news.reported);
        }
        self.reported()
    }

    fn reported(&self) -> CloudSample {
        let mut notices = Vec::new();
        let mut failed = (self.keys.len() < self.expected).then(|| "no answer yet".to_owned());
        for (key, reported) in &self.keys {
            match reported {
                Ok(reported) => notices.extend(reported.iter().cloned()),
                Err(why) => failed = Some(format!("{key}: {why}")),
            }
        }
        let notices = match failed {
            // What one key announces is not hidden because another cannot be read.
            Some(why) if notices.is_empty() => Err(why),
            _ => Ok(notices),
        };
        CloudSample { provider: self.provider.name().to_owned(), notices }
    }
}
