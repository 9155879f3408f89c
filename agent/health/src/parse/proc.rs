//! Parses procfs files about processes.

/// Fields of `/proc/PID/stat`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessStat {
    /// The name of its program, as truncated by the kernel.
    pub name: String,
    /// `R`, `S`, `D`, `Z`.
    pub state: char,
    /// Its parent.
    pub parent: i32,
    /// It is a kernel thread.
    pub kernel_thread: bool,
    /// When it started, in ticks since boot.
    pub start: u64,
}

/// `PF_KTHREAD` of the kernel's task flags.
const KERNEL_THREAD: u64 = 0x0020_0000;

/// Parses `/proc/PID/stat`. The name is in parentheses and may itself contain parentheses and blanks.
pub fn process_stat(text: &str) -> Option<ProcessStat> {
    let (before, rest) = text.rsplit_once(')')?;
    let name = before.split_once('(')?.1.to_owned();
    let mut fields = rest.split_whitespace();
    let state = fields.next()?.chars().next()?;
    let parent = fields.next()?.parse().ok()?;
    let flags: u64 = fields.nth(4)?.parse().ok()?;
    let start = fields.nth(12)?.parse().ok()?;
    Some(ProcessStat { name, state, parent, kernel_thread: flags & KERNEL_THREAD != 0, start })
}

/// How often a task was scheduled on a CPU, from `/proc/PID/schedstat`.
pub fn runs(text: &str) -> Option<u64> {
    text.split_whitespace().nth(2)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_any_name_is_parsed() {
        let line =
            "4711 (a) b (c)) D 17 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 9 0 987654 0 0 18446744073709551615";
        let stat = process_stat(line).unwrap();
        assert_eq!((stat.name.as_str(), stat.state, stat.parent), ("a) b (c)", 'D', 17));
        assert_eq!((stat.start, stat.kernel_thread), (987_654, false));
        let thread = "2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0 0 0 0 0 20 0 1 0 1 0 0";
        assert!(process_stat(thread).unwrap().kernel_thread);
    }

    #[test]
    fn other_text_is_no_process() {
        for wrong in ["", "1", "1 (a", "1 (a)", "1 (a) S", "1 (a) S x", ") ( ", "1 (a) S 1 1 1 1 1 x"] {
            assert_eq!(process_stat(wrong), None, "{wrong}");
        }
        assert_eq!((runs("12 34 56\n"), runs("12 34"), runs("")), (Some(56), None, None));
    }
}
