//! A bucket: where it is, and the few things that are done with it.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutPayload};

use crate::parts::Parts;

/// How often a request is tried before the shard is left for later. The stores of clouds try again by themselves as well.
const TRIES: u32 = 5;

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum DurableError {
    /// The URL is of no use.
    #[error("{url}: {problem}")]
    Url {
        /// What was given.
        url: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The store refused or did not answer.
    #[error("{what} {path}: {source}")]
    Store {
        /// What was done.
        what: &'static str,
        /// To which object.
        path: String,
        /// What the store says.
        source: Error,
    },
    /// Bytes are not what they must be.
    #[error("{path} is not what was sealed: {problem}")]
    Changed {
        /// Which object.
        path: String,
        /// In which way.
        problem: String,
        /// The first chunk that is another, where that is known.
        chunk: Option<u32>,
    },
    /// Something on this host.
    #[error("{0}")]
    Local(String),
    /// There is something newer to do, or the agent ends.
    #[error("it was abandoned")]
    GivenUp,
}

impl DurableError {
    /// Whether the upload that was begun is not known any more: it is begun anew then.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self, DurableError::Store { source: Error::NotFound { .. }, .. })
    }
}

/// Where steps are kept.
#[derive(Clone)]
pub struct Bucket {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) parts: Parts,
    prefix: Path,
    url: String,
    /// The wait before a request is tried a second time; then twice as long each time.
    pub(crate) patience: Duration,
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Bucket").field(&self.url).finish()
    }
}

impl Bucket {
    /// Opens what a URL names: `file:///directory`, and with the feature `cloud` `s3://bucket/prefix`, `gs://…` and `az://…`.
    /// Credentials and endpoints come from the environment, in each cloud's own variables.
    ///
    /// # Errors
    /// The URL cannot be read, or names what this program cannot reach.
    pub fn open(url: &str) -> Result<Bucket, DurableError> {
        let refused = |problem: String| DurableError::Url { url: url.to_owned(), problem };
        let Some((scheme, rest)) = url.split_once("://") else {
            return Err(refused(
                "it must be a URL such as file:///directory or s3://bucket/prefix".to_owned(),
            ));
        };
        if scheme == "file" {
            let directory = PathBuf::from(rest);
            if !directory.is_absolute() {
                return Err(refused("file:// must be followed by an absolute path".to_owned()));
            }
            std::fs::create_dir_all(&directory).map_err(|error| refused(format!("making it: {error}")))?;
            let store = object_store::local::LocalFileSystem::new_with_prefix(&directory);
            let store = store.map_err(|error| refused(error.to_string()))?.with_fsync(true);
            let parts = Parts::Files(directory);
            return Ok(Bucket::of(Arc::new(store), parts, "", url));
        }
        cloud::open(scheme, rest, url)
    }

    /// A bucket in a store that is open already. `url` is what it is called.
    #[must_use]
    pub fn of(store: Arc<dyn ObjectStore>, parts: Parts, prefix: &str, url: &str) -> Bucket {
        let patience = Duration::from_millis(250);
        Bucket { store, parts, prefix: Path::from(prefix), url: url.to_owned(), patience }
    }

    /// A bucket in any store that knows uploads in parts.
    #[must_use]
    pub fn over<S: ObjectStore + MultipartStore>(store: Arc<S>, url: &str) -> Bucket {
        Bucket::of(Arc::clone(&store) as _, Parts::Store(store), "", url)
    }

    /// As this one, with another wait between tries.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Bucket {
        Bucket { patience, ..self }
    }

    /// What it is called.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The place of an object; `name` is made of plain parts and slashes.
    pub(crate) fn path(&self, name: &str) -> Path {
        name.split('/')
            .filter(|part| !part.is_empty())
            .fold(self.prefix.clone(), |path, part| path.join(part))
    }

    pub(crate) async fn put(&self, name: &str, content: Vec<u8>) -> Result<(), DurableError> {
        let path = self.path(name);
        let payload = PutPayload::from(content);
        self.again("writing", &path, || self.store.put(&path, payload.clone())).await.map(drop)
    }

    /// An object's bytes; none if it is not there.
    pub(crate) async fn get(&self, name: &str, limit: usize) -> Result<Option<Vec<u8>>, DurableError> {
        let path = self.path(name);
        let got = self.again("reading", &path, || async {
            let found = self.store.get(&path).await?;
            if found.meta.size > limit as u64 {
                return Ok(None);
            }
            found.bytes().await.map(|bytes| Some(bytes.to_vec()))
        });
        match got.await {
            Err(DurableError::Store { source: Error::NotFound { .. }, .. }) => Ok(None),
            Ok(None) => Err(DurableError::Changed {
                path: path.to_string(),
                problem: format!("it is longer than {limit} bytes"),
                chunk: None,
            }),
            got => got,
        }
    }

    /// How long an object is; none if it is not there.
    pub(crate) async fn length(&self, name: &str) -> Result<Option<u64>, DurableError> {
        let path = self.path(name);
        match self.again("looking at", &path, || self.store.head(&path)).await {
            Ok(meta) => Ok(Some(meta.size)),
            Err(DurableError::Store { source: Error::NotFound { .. }, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Deletes an object; one that is not there counts as deleted.
    pub(crate) async fn delete(&self, name: &str) -> Result<(), DurableError> {
        let path = self.path(name);
        match self.again("deleting", &path, || self.store.delete(&path)).await {
            Err(DurableError::Store { source: Error::NotFound { .. }, .. }) => Ok(()),
            done => done,
        }
    }

    /// Tries a request again where that may help.
    pub(crate) async fn again<T, F>(
        &self,
        what: &'static str,
        path: &Path,
        mut request: impl FnMut() -> F,
    ) -> Result<T, DurableError>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let mut wait = self.patience;
        for last in (0..TRIES).map(|index| index + 1 == TRIES) {
            match request().await {
                Ok(done) => return Ok(done),
                Err(source) if last || is_final(&source) => {
                    return Err(DurableError::Store { what, path: path.to_string(), source });
                }
                Err(error) => tracing::debug!(what, %path, %error, "durable storage: tried again"),
            }
            tokio::time::sleep(wait).await;
            wait *= 2;
        }
        Err(DurableError::GivenUp)
    }
}

/// Whether the same request will get the same answer.
fn is_final(error: &Error) -> bool {
    matches!(
        error,
        Error::NotFound { .. }
            | Error::InvalidPath { .. }
            | Error::NotSupported { .. }
            | Error::AlreadyExists { .. }
            | Error::Precondition { .. }
            | Error::NotImplemented { .. }
            | Error::PermissionDenied { .. }
            | Error::Unauthenticated { .. }
            | Error::UnknownConfigurationKey { .. }
    )
}

#[cfg(not(feature = "cloud"))]
mod cloud {
    use super::{Bucket, DurableError};

    pub(super) fn open(scheme: &str, _rest: &str, url: &str) -> Result<Bucket, DurableError> {
        let problem = match scheme {
            "s3" | "gs" | "az" => {
                format!("this program was built without `{scheme}`: build it with --features cloud")
            }
            _ => "only file:// is known here (s3://, gs:// and az:// with --features cloud)".to_owned(),
        };
        Err(DurableError::Url { url: url.to_owned(), problem })
    }
}

#[cfg(feature = "cloud")]
mod cloud {
    use std::sync::Arc;

    use object_store::aws::AmazonS3Builder;
    use object_store::azure::MicrosoftAzureBuilder;
    use object_store::gcp::GoogleCloudStorageBuilder;

    use super::{Bucket, DurableError, Parts};

    pub(super) fn open(scheme: &str, rest: &str, url: &str) -> Result<Bucket, DurableError> {
        let refused = |problem: String| DurableError::Url { url: url.to_owned(), problem };
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(refused("it names no bucket".to_owned()));
        }
        // The first to choose it wins, and it is this one everywhere.
        let _ = rustls::crypto::ring::default_provider().install_default();
        macro_rules! built {
            ($builder:expr) => {{
                let store = Arc::new($builder.build().map_err(|error| refused(error.to_string()))?);
                Ok(Bucket::of(Arc::clone(&store) as _, Parts::Store(store), prefix, url))
            }};
        }
        match scheme {
            "s3" => built!(AmazonS3Builder::from_env().with_bucket_name(bucket)),
            "gs" => built!(GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket)),
            "az" => built!(MicrosoftAzureBuilder::from_env().with_container_name(bucket)),
            _ => Err(refused("only file://, s3://, gs:// and az:// are known".to_owned())),
        }
    }
}
