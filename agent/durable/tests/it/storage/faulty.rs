//! A store in memory that refuses, forgets or stops at any request.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use futures_util::stream::{BoxStream, StreamExt};
use object_store::memory::InMemory;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartId, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// The fault of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Every nth request is answered with 503, once.
    Busy(usize),
    /// From this request on all fail, as if the client were killed.
    Dead(usize),
    /// No fault.
    None,
}

/// A store with a fault in front of it. Its content outlives the fault.
#[derive(Clone, Debug)]
pub struct Faulty {
    pub store: Arc<InMemory>,
    fault: Fault,
    requests: Arc<AtomicUsize>,
    pub parts: Arc<AtomicUsize>,
}

impl Faulty {
    pub fn new(store: &Arc<InMemory>, fault: Fault) -> Faulty {
        Faulty { store: Arc::clone(store), fault, requests: Arc::default(), parts: Arc::default() }
    }

    pub fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }

    fn pass(&self) -> Result<()> {
        let number = self.requests.fetch_add(1, Ordering::SeqCst);
        match self.fault {
            Fault::Busy(every) if number.is_multiple_of(every) => {
                Err(Error::Generic { store: "faulty", source: "503 Slow Down".into() })
            }
            Fault::Dead(from) if number >= from => {
                Err(Error::PermissionDenied { path: String::new(), source: "killed".into() })
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Faulty({:?})", self.fault)
    }
}

#[async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.pass()?;
        self.store.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.store.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.pass()?;
        self.store.get_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        match self.pass() {
            Ok(()) => self.store.delete_stream(locations),
            Err(error) => futures_util::stream::once(async { Err(error) }).boxed(),
        }
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.pass() {
            Ok(()) => self.store.list(prefix),
            Err(error) => futures_util::stream::once(async { Err(error) }).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.pass()?;
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.store.copy_opts(from, to, options).await
    }
}

#[async_trait]
impl MultipartStore for Faulty {
    async fn create_multipart(&self, path: &Path) -> Result<MultipartId> {
        self.pass()?;
        self.store.create_multipart(path).await
    }

    async fn put_part(&self, path: &Path, id: &MultipartId, part: usize, data: PutPayload) -> Result<PartId> {
        self.pass()?;
        self.parts.fetch_add(1, Ordering::SeqCst);
        self.store.put_part(path, id, part, data).await
    }

    async fn complete_multipart(
        &self,
        path: &Path,
        id: &MultipartId,
        parts: Vec<PartId>,
    ) -> Result<PutResult> {
        self.pass()?;
        self.store.complete_multipart(path, id, parts).await
    }

    async fn abort_multipart(&self, path: &Path, id: &MultipartId) -> Result<()> {
        self.pass()?;
        self.store.abort_multipart(path, id).await
    }
}
