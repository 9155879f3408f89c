//! A bucket: its location and the basic operations.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutPayload};

use crate::parts::Parts;

/// Number of tries of a request before the shard is left for later. The clients of cloud stores also retry by themselves.
const MAX_TRIES: u32 = 5;

/// Errors of durable storage.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message of each says it")]
pub enum DurableError {
    #[error("{url}: {problem}")]
    Url { url: String, problem: String },
    #[error("{what} {path}: {source}")]
    Store { what: &'static str, path: String, source: Error },
    #[error("{path} is not what was sealed: {problem}")]
    Changed {
        path: String,
        problem: String,
        /// The first chunk that differs, if known.
        chunk: Option<u32>,
    },
    #[error("{0}")]
    Local(String),
    /// There is newer work, or the agent stops.
    #[error("it was abandoned")]
    GivenUp,
}

impl DurableError {
    /// Whether the store no longer knows the upload, so that it must start again.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self, DurableError::Store { source: Error::NotFound { .. }, .. })
    }
}

/// A bucket that stores steps.
#[derive(Clone)]
pub struct Bucket {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) parts: Parts,
    prefix: Path,
    url: String,
    /// The wait before the second try of a request, doubled each time.
    pub(crate) patience: Duration,
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Bucket").field(&self.url).finish()
    }
}

impl Bucket {
    /// Opens the bucket of a URL: `file:///directory`, and with the feature `cloud` `s3://bucket/prefix`, `gs://…` and `az://…`.
    /// Credentials and endpoints come from the environment, in each cloud's own variables.
    ///
    /// # Errors
    /// The URL cannot be parsed, or names a store that this program cannot reach.
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
            return Ok(Bucket::new(Arc::new(store), parts, "", url));
        }
        cloud::open(scheme, rest, url)
    }

    /// A bucket in an open store. `url` is its name.
    #[must_use]
    pub fn new(store: Arc<dyn ObjectStore>, parts: Parts, prefix: &str, url: &str) -> Bucket {
        let patience = Duration::from_millis(250);
        Bucket { store, parts, prefix: Path::from(prefix), url: url.to_owned(), patience }
    }

    /// A bucket in any store that supports multipart uploads.
    #[must_use]
    pub fn over<S: ObjectStore + MultipartStore>(store: Arc<S>, url: &str) -> Bucket {
        Bucket::new(Arc::clone(&store) as _, Parts::Store(store), "", url)
    }

    /// Changes the wait between tries.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Bucket {
        Bucket { patience, ..self }
    }

    /// The URL.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The path of an object; `name` consists of plain parts and slashes.
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

    /// The bytes of an object; none if it does not exist.
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

    /// The length of an object; none if it does not exist.
    pub(crate) async fn length(&self, name: &str) -> Result<Option<u64>, DurableError> {
        let path = self.path(name);
        match self.again("looking at", &path, || self.store.head(&path)).await {
            Ok(meta) => Ok(Some(meta.size)),
            Err(DurableError::Store { source: Error::NotFound { .. }, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Deletes an object; a missing one counts as deleted.
    pub(crate) async fn delete(&self, name: &str) -> Result<(), DurableError> {
        let path = self.path(name);
        match self.again("deleting", &path, || self.store.delete(&path)).await {
            Err(DurableError::Store { source: Error::NotFound { .. }, .. }) => Ok(()),
            done => done,
        }
    }

    /// Repeats a request if that may help.
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
        for last in (0..MAX_TRIES).map(|index| index + 1 == MAX_TRIES) {
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

/// Whether a repeated request would get the same answer.
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
        // The first choice is final, and it is the same everywhere.
        let _ = rustls::crypto::ring::default_provider().install_default();
        macro_rules! built {
            ($builder:expr) => {{
                let store = Arc::new($builder.build().map_err(|error| refused(error.to_string()))?);
                Ok(Bucket::new(Arc::clone(&store) as _, Parts::Store(store), prefix, url))
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
