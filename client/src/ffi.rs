//! The C API of the client, as declared in `c/mainstay.h`: one page per process, without a handle.
//!
//! No panic crosses into C, and NULL is allowed wherever a pointer is taken.

use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;

use mainstay_heartbeat::{Collective, ExitKind, Measures, Note, SectionId};

use crate::client::Client;

/// The client that was opened last. Earlier ones are not freed: another thread may be using one at this instant.
static CURRENT: AtomicPtr<Client> = AtomicPtr::new(ptr::null_mut());
/// The text for [`mainstay_refusal`]; not freed either, because the caller may hold it.
static REFUSAL: AtomicPtr<c_char> = AtomicPtr::new(ptr::null_mut());

/// Runs `call` on the current client. A panic becomes the type's default.
#[inline]
fn with_client<T: Default>(call: impl FnOnce(&Client) -> T) -> T {
    guarded(|| {
        // SAFETY: null, or a client leaked by `keep` and published whole by its release store.
        unsafe { CURRENT.load(Ordering::Acquire).as_ref() }.map(call).unwrap_or_default()
    })
}

#[inline]
fn guarded<T: Default>(call: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_default()
}

fn keep(client: Client) -> c_int {
    let active = client.is_active();
    let refusal = client.refusal().map(|error| error.to_string().replace('\0', "?"));
    let text = refusal.and_then(|text| CString::new(text).ok()).map_or(ptr::null_mut(), CString::into_raw);
    REFUSAL.store(text, Ordering::Release);
    CURRENT.store(Box::into_raw(Box::new(client)), Ordering::Release);
    c_int::from(active)
}

/// Opens the page that `MAINSTAY_PAGE` names; 1 if beats reach it from now on, else 0.
#[unsafe(no_mangle)]
pub extern "C" fn mainstay_open() -> c_int {
    guarded(|| keep(Client::from_env_as("c")))
}

/// Opens the page at `path`; 1 if beats reach it from now on, else 0.
///
/// # Safety
/// `path` is NULL or points to a string that ends in a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mainstay_open_path(path: *const c_char) -> c_int {
    guarded(|| {
        if path.is_null() {
            return 0;
        }
        // SAFETY: not null, and a string by the caller's promise.
        let path = unsafe { CStr::from_ptr(path) };
        keep(Client::open_or_refuse(Path::new(OsStr::from_bytes(path.to_bytes())), "c"))
    })
}

/// 1 if beats reach a page, else 0: before an open, after a close, in a forked child.
#[unsafe(no_mangle)]
pub extern "C" fn mainstay_active() -> c_int {
    with_client(|client| c_int::from(client.is_active()))
}

/// Why there was a page but it is not used; NULL if there is no problem. Valid for the process's life.
#[unsafe(no_mangle)]
pub extern "C" fn mainstay_refusal() -> *const c_char {
    REFUSAL.load(Ordering::Acquire)
}

/// The rank is alive, though no step is complete.
#[unsafe(no_mangle)]
pub extern "C" fn mainstay_beat() {
    with_client(Client::beat);
}

/// Step `step` is complete.
#[unsafe(no_mangle)]
pub extern "C" fn mainstay_step(step: u64) {
    with_client(|client| client.step(step));
}

/// Step `step` is complete, with its measures. NULL is "not given", so that NaN can be given.
///
/// # Safety
/// Each pointer is NULL or points to a value of its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mainstay_step_with(
    step: u64,
    loss: *const f64,
    grad_norm: *const f64,
    digest: *const u64,
) {
    with_client(|client| {
        // SAFETY: each is NULL or points to a value by the caller's promise.
        let measures = unsafe {
            Measures {
                loss: loss.as_ref().copied(),
                grad_norm: grad_norm.as_ref().copied(),
                digest: digest.as_ref().copied(),
            }
        };
        client.step_with(step, measures);
    });
}

/// The id of a section's name, to store and use again; 0 ("other") if there is no page or no room.
///
/// # Safety
/// `name` is NULL or points to a string that ends in a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mainstay_section_intern(name: *const c_char) -> u32 {
    with_client(|client| {
        if name.is_null() {
            return 0;
        }
        // SAFETY: not null, and a string by the caller's promise.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        client.intern(&name).get().into()
    })
}

/// Section `id` starts.
#[unsafe(no_mangle)]
pub extern "C" fn mainstay_section_enter(id: u32) {
    with_client(|client| client.enter(SectionId::new(id.into())));
}

/// Section `id` ends.
#[unsafe(no_mangle)]
pub extern "C" fn mainstay_section_leave(id: u32) {
    with_client(|client| client.leave(SectionId::new(id.into())));
}

/// Communicator `comm` has entered and completed this many collective operations.
#[unsafe(no_mangle)]
pub extern "C" fn mainstay_collective(comm: u64, entered: u64, completed: u64) {
    with_client(|client| client.collective(comm, entered, completed));
}

/// As [`mainstay_collective`], with a number for kind, type and size of the operation entered last.
#[unsafe(no_mangle)]
pub extern "C" fn mainstay_collective_with(comm: u64, entered: u64, completed: u64, signature: u64) {
    with_client(|client| client.collective_with(Collective { comm, entered, completed, signature }));
}

/// The rank's current position in its data: the same number whenever the same batch is read.
#[unsafe(no_mangle)]
pub extern "C" fn mainstay_data_at(position: u64) {
    with_client(|client| client.data_at(position));
}

/// The number of steps after which this program ends; 0 if it is unknown.
#[unsafe(no_mangle)]
pub extern "C" fn mainstay_total_steps(steps: u64) {
    with_client(|client| client.total_steps(steps));
}

/// The next phase takes long, at most this many seconds: no hang is reported meanwhile. NaN, negative and infinite
/// numbers are a pause.
#[unsafe(no_mangle)]
pub extern "C" fn mainstay_expect_long(seconds: f64) {
    with_client(|client| match Duration::try_from_secs_f64(seconds) {
        Ok(span) => client.expect_long(span),
        Err(_) => client.pause(),
    });
}

/// No hang is reported until the next resume.
#[unsafe(no_mangle)]
pub extern "C" fn mainstay_pause() {
    with_client(Client::pause);
}

/// Progress is expected again.
#[unsafe(no_mangle)]
pub extern "C" fn mainstay_resume() {
    with_client(Client::resume);
}

/// Leaves a note on how this process ends: kind 0 is an uncaught exception, 1 a clean exit, anything else other.
///
/// # Safety
/// Each pointer is NULL (an empty text) or points to a string that ends in a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mainstay_exit_note(
    kind: c_int,
    exception: *const c_char,
    message: *const c_char,
    traceback: *const c_char,
) {
    with_client(|client| {
        // SAFETY: each is NULL or a string by the caller's promise.
        let texts = unsafe { [text(exception), text(message), text(traceback)] };
        let kind = match kind {
            0 => ExitKind::Exception,
            1 => ExitKind::Clean,
            _ => ExitKind::Other,
        };
        client.exit_note(&Note { kind, exception: &texts[0], message: &texts[1], traceback: &texts[2] });
    });
}

/// Closes the page. Every later call does nothing until the next open.
#[unsafe(no_mangle)]
pub extern "C" fn mainstay_close() {
    with_client(Client::close);
}

/// A text argument; NULL is an empty one.
///
/// # Safety
/// `text` is NULL or points to a string that ends in a zero byte.
unsafe fn text<'a>(text: *const c_char) -> std::borrow::Cow<'a, str> {
    if text.is_null() {
        return "".into();
    }
    // SAFETY: not null, and a string by the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_does_not_cross_into_c() {
        assert_eq!(guarded(|| -> c_int { panic!("a defect of ours") }), 0);
    }
}
