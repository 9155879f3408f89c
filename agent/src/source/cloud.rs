//! What the cloud announces for this machine, by its metadata server.
//!
//! Which cloud it is, the firmware says (DMI, in sysfs): on other machines nothing is asked, and no name is ever
//! resolved. Each key of the server is followed by a task of its own; together they are what was last told.

mod google;
mod http;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use mainstay_core::cloud::{CloudSample, Notice};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

pub use http::HttpError;

/// A cloud whose metadata server can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// Google Compute Engine.
    Google,
}

impl Provider {
    /// Whose machine this is by its firmware; none if it is of none of these clouds.
    pub fn by_firmware(sys: &Path) -> Option<Provider> {
        let dmi = |name: &str| std::fs::read_to_string(sys.join("class/dmi/id").join(name)).unwrap_or_default();
        (dmi("product_name").trim() == "Google Compute Engine").then_some(Provider::Google)
    }

    /// Its name for people.
    fn name(self) -> &'static str {
        match self {
            Provider::Google => "Google Compute Engine",
        }
    }
}

/// The address that clouds have agreed on; it needs no name server.
pub const USUAL_ADDRESS: &str = "169.254.169.254:80";

/// How long nothing may change before the same is told again, so that what has become near is judged anew.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Answers of keys that may wait to be taken.
const QUEUE: usize = 16;

/// The announcements of the cloud.
#[derive(Debug)]
pub struct CloudSource {
    provider: Provider,
    runtime: Runtime,
    news: mpsc::Receiver<News>,
    /// What each key last told.
    keys: BTreeMap<&'static str, Result<Vec<Notice>, String>>,
    /// How many keys there are.
    expected: usize,
}

/// What a key tells from now on.
#[derive(Debug)]
struct News {
    key: &'static str,
    told: Result<Vec<Notice>, String>,
}

impl CloudSource {
    /// Follows the metadata server at `address`, as `host:port`. Nothing is asked before the first wait.
    ///
    /// # Errors
    /// The kernel gives no descriptors.
    pub fn new(provider: Provider, address: &str) -> io::Result<CloudSource> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (sender, news) = mpsc::channel(QUEUE);
        let expected = match provider {
            Provider::Google => google::follow(&runtime, address, &sender),
        };
        Ok(CloudSource { provider, runtime, news, keys: BTreeMap::new(), expected })
    }

    /// Waits until something has changed, or for half a minute, and returns all that is announced.
    pub fn wait(&mut self) -> CloudSample {
        let wait = async {
            let Some(first) = self.news.recv().await else { return };
            self.keys.insert(first.key, first.told);
            // At the start all keys answer at once; what comes together is told together.
            while self.keys.len() < self.expected {
                let Some(next) = self.news.recv().await else { return };
                self.keys.insert(next.key, next.told);
            }
            while let Ok(next) = self.news.try_recv() {
                self.keys.insert(next.key, next.told);
            }
        };
        // An end by time is as good as news: what is known is told again.
        let _ = self.runtime.block_on(async { tokio::time::timeout(LONGEST_WAIT, wait).await });
        self.sample()
    }

    fn sample(&self) -> CloudSample {
        let mut notices = Vec::new();
        let mut failed = (self.keys.len() < self.expected).then(|| "no answer yet".to_owned());
        for (key, told) in &self.keys {
            match told {
                Ok(told) => notices.extend(told.iter().cloned()),
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
