//! Uploads in parts. The store keeps each received part until the upload is completed, so that a killed agent can
//! resume: the state for that is in a small local file.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{Error, PutPayload};
use serde::{Deserialize, Serialize};

/// Directory of incomplete uploads in a bucket of files.
const UPLOADS_DIRECTORY: &str = ".uploads";

/// What receives parts.
#[derive(Clone)]
pub enum Parts {
    /// A store that supports multipart uploads.
    Store(Arc<dyn MultipartStore>),
    /// A directory: parts are written to their offsets in a file, which is renamed when all are there.
    Files(PathBuf),
}

/// State of a running upload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UploadState {
    /// The object.
    pub(crate) name: String,
    /// Its upload id in the store.
    pub(crate) id: String,
    /// Bytes of each part except the last.
    pub(crate) part_bytes: u64,
    /// The store's answer for each part that it has.
    pub(crate) done: BTreeMap<usize, String>,
}

impl UploadState {
    pub(crate) fn read(file: &FilePath) -> Option<UploadState> {
        serde_json::from_slice(&fs::read(file).ok()?).ok()
    }

    /// Writes a temporary file and renames it: a half-written file would lose the uploaded parts.
    pub(crate) fn write(&self, file: &FilePath) -> io::Result<()> {
        let aside = file.with_extension("tmp");
        fs::write(&aside, serde_json::to_vec(self).map_err(io::Error::other)?)?;
        fs::rename(&aside, file)
    }
}

impl Parts {
    pub(crate) async fn begin(&self, path: &Path) -> Result<String, Error> {
        match self {
            Parts::Store(store) => store.create_multipart(path).await,
            Parts::Files(root) => {
                let (root, path) = (root.clone(), path.to_string());
                aside(&path, move || {
                    static COUNT: AtomicU64 = AtomicU64::new(0);
                    let count = COUNT.fetch_add(1, Ordering::Relaxed);
                    let now = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos());
                    let id = format!("{now:x}-{:x}-{count:x}", std::process::id());
                    fs::create_dir_all(root.join(UPLOADS_DIRECTORY))?;
                    File::create_new(root.join(UPLOADS_DIRECTORY).join(&id))?;
                    Ok(id)
                })
                .await
            }
        }
    }

    /// Uploads part `index`, which starts at `offset`.
    pub(crate) async fn put(
        &self,
        path: &Path,
        id: &str,
        index: usize,
        offset: u64,
        bytes: PutPayload,
    ) -> Result<String, Error> {
        match self {
            Parts::Store(store) => {
                let id = id.to_owned();
                store.put_part(path, &id, index, bytes).await.map(|part| part.content_id)
            }
            Parts::Files(root) => {
                let file = upload(root, id);
                aside(path.as_ref(), move || {
                    // The file is never created here: if it is missing, the upload and all its parts are lost.
                    let file = OpenOptions::new().write(true).open(file)?;
                    let mut at = offset;
                    for piece in &bytes {
                        file.write_all_at(piece, at)?;
                        at += piece.len() as u64;
                    }
                    file.sync_data()?;
                    Ok(String::new())
                })
                .await
            }
        }
    }

    pub(crate) async fn complete(&self, path: &Path, id: &str, parts: Vec<String>) -> Result<(), Error> {
        match self {
            Parts::Store(store) => {
                let parts = parts.into_iter().map(|content_id| PartId { content_id }).collect();
                store.complete_multipart(path, &id.to_owned(), parts).await.map(drop)
            }
            Parts::Files(root) => {
                let (file, root, to) = (upload(root, id), root.clone(), root.join(path.as_ref()));
                aside(path.as_ref(), move || {
                    File::open(&file)?.sync_all()?;
                    let home = to.parent().unwrap_or(&root);
                    fs::create_dir_all(home)?;
                    fs::rename(&file, &to)?;
                    // Sync each directory on the path, because a new directory is not on disk yet.
                    home.ancestors()
                        .take_while(|above| above.starts_with(&root))
                        .try_for_each(|above| File::open(above)?.sync_all())
                })
                .await
            }
        }
    }

    pub(crate) async fn abort(&self, path: &Path, id: &str) -> Result<(), Error> {
        match self {
            Parts::Store(store) => store.abort_multipart(path, &id.to_owned()).await,
            Parts::Files(root) => {
                let file = upload(root, id);
                aside(path.as_ref(), move || fs::remove_file(file)).await
            }
        }
    }
}

/// The path of an upload. The id is reduced to a plain name, regardless of the file that it was read from.
fn upload(root: &FilePath, id: &str) -> PathBuf {
    let plain: String = id.chars().filter(|c| c.is_ascii_hexdigit() || *c == '-').collect();
    root.join(UPLOADS_DIRECTORY).join(plain)
}

async fn aside<T: Send + 'static>(
    path: &str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, Error> {
    let done = tokio::task::spawn_blocking(work).await.map_err(|source| Error::JoinError { source })?;
    done.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::NotFound { path: path.to_owned(), source: error.into() },
        io::ErrorKind::PermissionDenied => {
            Error::PermissionDenied { path: path.to_owned(), source: error.into() }
        }
        _ => Error::Generic { store: "file", source: error.into() },
    })
}
