//! Violations of DCGM's policies, as its library reports them on a separate thread.

use std::ffi::{c_int, c_uint};
use std::sync::{Mutex, PoisonError};

use mainstay_health::hardware::dcgm::Violation;

/// The type of the library's callback.
pub(super) type Callback = extern "C" fn(*const Response, u64) -> c_int;

/// Uncorrected memory errors, PCIe, retired pages, heat, NVLink, XIDs; not power.
pub(super) const CONDITIONS: c_uint = 0x1 | 0x2 | 0x4 | 0x8 | 0x20 | 0x40;

/// The conditions that are requested if no one has set a policy: the same without heat, since the limits of a board are unknown here.
const OURS: c_uint = CONDITIONS & !0x8;

/// Kinds of conditions (DCGM_POLICY_COND_MAX), and the index of retired pages among them.
const KINDS: usize = 7;
const PAGES: usize = 2;

/// Retired pages from which it is reported. Half of what DCGM itself calls a failure is usual for old boards.
const MOST_PAGES: i64 = 60;

/// `dcgmPolicyConditionParams_t`: whether a condition counts, or its threshold.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Parameter {
    is_number: c_uint,
    value: i64,
}

/// `dcgmPolicy_v1`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Policy {
    version: c_uint,
    conditions: c_uint,
    /// Mode, isolation, action, validation, response: all are none.
    deeds: [c_uint; 5],
    parameters: [Parameter; KINDS],
}

impl Policy {
    /// An empty policy for the library to write to.
    pub(super) fn none() -> Policy {
        let version = super::version(size_of::<Policy>(), 1);
        Policy { version, conditions: 0, deeds: [0; 5], parameters: [Parameter::default(); KINDS] }
    }

    /// A policy that only reports and takes no action.
    pub(super) fn notifying() -> Policy {
        let mut policy = Policy { conditions: OURS, ..Policy::none() };
        for (place, parameter) in policy.parameters.iter_mut().enumerate() {
            parameter.value = i64::from(OURS >> place & 1);
        }
        policy.parameters[PAGES] = Parameter { is_number: 1, value: MOST_PAGES };
        policy
    }

    /// Whether it was set.
    pub(super) fn is_set(&self) -> bool {
        self.conditions != 0
    }
}

/// More violations than are read between two checks.
const MOST: usize = 256;

/// `dcgmPolicyCallbackResponse_t`. The data of the condition start with a time; then follow a number, or a kind and a
/// number. The GPU is included from the second version on.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Response {
    version: c_uint,
    condition: c_uint,
    at: i64,
    first: c_uint,
    second: c_uint,
    gpu: c_uint,
}

/// The second version, with its size.
const WITH_GPU: c_uint = 0x0200_0020;

static NOTED: Mutex<Vec<Violation>> = Mutex::new(Vec::new());

/// Notes a violation. The library calls it.
pub(super) extern "C" fn note(response: *const Response, _: u64) -> c_int {
    if response.is_null() {
        return 0;
    }
    // SAFETY: the library passes a pointer to a response that lives as long as the call; all versions contain everything
    // before the last word.
    let (version, condition, first, second) = unsafe {
        let version = (&raw const (*response).version).read();
        let condition = (&raw const (*response).condition).read();
        (version, condition, (&raw const (*response).first).read(), (&raw const (*response).second).read())
    };
    // SAFETY: this version has that word.
    let gpu = (version == WITH_GPU).then(|| unsafe { (&raw const (*response).gpu).read() });
    // For memory errors and links the number is second; for retired pages there are two.
    let value = match condition {
        0x1 | 0x20 => second.into(),
        0x4 => u64::from(first) + u64::from(second),
        _ => first.into(),
    };
    let mut noted = NOTED.lock().unwrap_or_else(PoisonError::into_inner);
    if noted.len() < MOST {
        noted.push(Violation { condition, gpu, value });
    }
    0
}

/// Takes the violations since the last call.
pub(super) fn take() -> Vec<Violation> {
    std::mem::take(&mut *NOTED.lock().unwrap_or_else(PoisonError::into_inner))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_is_laid_out_as_the_library_writes_it() {
        assert_eq!((size_of::<Response>(), std::mem::offset_of!(Response, gpu)), (32, 24));
        assert_eq!((size_of::<Policy>(), std::mem::offset_of!(Policy, parameters)), (144, 32));
    }
}
