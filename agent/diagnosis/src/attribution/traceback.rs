//! Parses Python exceptions: what was raised, and whether in the program or in a library.

/// Frameworks that run from a source checkout, as in container images, and call the libraries installed beside them.
pub const CALLING_CHECKOUTS: [&str; 9] = [
    "/autotrain/",
    "/axolotl/",
    "/llamafactory/",
    "/Megatron-Bridge/",
    "/NeMo/",
    "/OpenRLHF/",
    "/levanter/",
    "/maxtext/",
    "/torchtitan/",
];

/// A frame of a traceback.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame {
    /// The file as the interpreter names it.
    pub path: String,
    /// The function, if the line has it.
    pub function: String,
    /// Whether the source text below it is a `raise`. `None` if there is no source text.
    pub raises: Option<bool>,
    /// It is Mainstay's client, or Python's own library called by the client.
    pub in_client: bool,
}

/// The modules of Mainstay's Python package, the client. A test compares them with the package.
const CLIENT: [&str; 35] = [
    "__init__",
    "_collectives_release",
    "_container",
    "_digest",
    "_digest_kernel",
    "_disk",
    "_doubt",
    "_drill",
    "_framework",
    "_hooks",
    "_memory_steps",
    "_modules",
    "_pinned",
    "_pool",
    "_reconfigure",
    "_restartable",
    "_role",
    "_roles",
    "_rounds",
    "_seal",
    "_section",
    "_shard",
    "_torch_collectives",
    "_torch_sections",
    "_torch_store",
    "_world",
    "checkpoint",
    "dcp",
    "jax",
    "lightning",
    "policy",
    "mainstay_auto",
    "mainstay_torchrun",
    "torch",
    "transformers",
];

/// The client's function in which objects of the program are unpickled: native code then fails for the program's reasons.
const UNPICKLES: &str = "of_the_program";

impl Frame {
    /// Whether the frame is Mainstay's client at work, wherever the package is installed.
    fn is_client(&self) -> bool {
        let mut parts = self.path.rsplit('/');
        let module = parts.next().and_then(|file| file.strip_suffix(".py"));
        let package = parts.next();
        module.is_some_and(|module| {
            CLIENT.contains(&module) && (package == Some("mainstay") || module.starts_with("mainstay_"))
        }) && self.function != UNPICKLES
    }

    /// Whether the file belongs to Python itself.
    fn is_python(&self) -> bool {
        let installed = ["site-packages", "dist-packages"].iter().any(|place| self.path.contains(place));
        self.path.starts_with("<frozen ") || self.path.contains("/lib/python3") && !installed
    }

    /// The same frame, called by `caller`.
    #[must_use]
    pub fn called_by(self, caller: Option<&Frame>) -> Frame {
        let by_client = caller.is_some_and(|caller| caller.in_client) && self.is_python();
        Frame { in_client: self.in_client || by_client, ..self }
    }

    /// Whether Mainstay's client failed here itself, rather than to report a mistake of its caller by a `raise`.
    pub fn is_failure_of_client(&self) -> bool {
        let on_purpose = self.raises != Some(false) && self.is_client();
        self.in_client && !on_purpose
    }

    /// Whether a `raise` of Mainstay's client raised the exception.
    pub fn is_raised_by_client(&self) -> bool {
        self.raises == Some(true) && self.is_client()
    }

    /// Whether the file belongs to an installed library or to Python rather than to the training program.
    pub fn in_library(&self) -> bool {
        const PLACES: [&str; 16] = [
            "site-packages",
            "dist-packages",
            "/lib/python",
            "/lib64/python",
            "<frozen",
            "<string>",
            "/usr/lib/",
            "\\lib\\",
            // Frameworks that run from a source checkout.
            "/pytorch/torch/",
            "/megatron/",
            "/Megatron-LM/",
            "/deepspeed/",
            "/nemo/",
            "/vllm/",
            "/sglang/",
            "/verl/",
        ];
        PLACES.iter().chain(&CALLING_CHECKOUTS).any(|place| self.path.contains(place))
    }
}

/// Parses `  File "/home/a/train.py", line 12, in main`. The text starts at or before `File`.
pub fn frame(text: &str) -> Option<Frame> {
    let at = text.find("File \"")?;
    let (path, rest) = text[at + 6..].split_once('"')?;
    let rest = rest.strip_prefix(", line ")?;
    let function = rest.split_once(", in ").map_or("", |(_, function)| function).trim();
    let frame =
        Frame { path: path.to_owned(), function: function.to_owned(), raises: None, in_client: false };
    Some(Frame { in_client: frame.is_client(), ..frame })
}

/// An exception in a line.
#[derive(Clone, Debug, PartialEq)]
pub struct Raised<'a> {
    /// Its type with modules.
    pub name: &'a str,
    /// Its message.
    pub message: &'a str,
    /// The line has other text before it: a log message, a wrapper's message.
    pub embedded: bool,
}

/// Parses `ValueError: text`, `torch.cuda.OutOfMemoryError`, `E   KeyError: 'a'`, `stderr: OSError: text`. The text starts after the
/// line's prefix.
pub fn raised(text: &str) -> Option<Raised<'_>> {
    let text = text.trim_start_matches(['|', '+', '-', ' ', '╭', '│']).trim_end();
    // pytest marks its lines with this.
    let text = text.strip_prefix("E  ").map_or(text, str::trim_start);
    if let Some(found) = at_start(text) {
        return Some(found);
    }
    // Elsewhere in the line: the first exception name before a colon.
    for (colon, _) in text.match_indices(": ").take(12) {
        let start = text[..colon]
            .rfind(|c: char| !is_name(c))
            .map_or(0, |at| at + text[at..].chars().next().map_or(1, char::len_utf8));
        let name = &text[start..colon];
        if is_exception(name) {
            return Some(Raised { name, message: &text[colon + 2..], embedded: true });
        }
    }
    None
}

/// Parses the line below the frames of a traceback whose exception has a name that [`raised`] does not recognise: `acme.Stalled: no
/// batch`. `None` for one that it does.
pub fn raised_below_frames(text: &str) -> Option<Raised<'_>> {
    const LEVELS: [&str; 4] = ["Debug", "Info", "Warning", "Critical"];
    if raised(text).is_some() {
        return None;
    }
    let end = text.find(|c: char| !is_name(c)).unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    let last = name.rsplit('.').next().unwrap_or(name);
    let is_type = last.starts_with(|first: char| first.is_ascii_uppercase())
        && last.contains(|letter: char| letter.is_ascii_lowercase())
        && !LEVELS.contains(&last);
    let message = rest.strip_prefix(':').or_else(|| rest.is_empty().then_some(rest))?.trim_start();
    is_type.then_some(Raised { name, message, embedded: false })
}

fn at_start(text: &str) -> Option<Raised<'_>> {
    let end = text.find(|c: char| !is_name(c)).unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    if !is_exception(name) {
        return None;
    }
    match rest.strip_prefix(':') {
        Some(message) => Some(Raised { name, message: message.trim_start(), embedded: false }),
        None if rest.is_empty() => Some(Raised { name, message: "", embedded: false }),
        None => None,
    }
}

fn is_name(letter: char) -> bool {
    letter.is_alphanumeric() || matches!(letter, '_' | '.')
}

/// By convention: a capital in the last part, and one of the usual endings.
fn is_exception(name: &str) -> bool {
    const ENDS: [&str; 9] =
        ["Error", "Exception", "Interrupt", "Exit", "Timeout", "Failure", "Iteration", "Expired", "Group"];
    let last = name.rsplit('.').next().unwrap_or(name);
    last.len() > 5
        && last.starts_with(|c: char| c.is_ascii_uppercase())
        && ENDS.iter().any(|end| last.ends_with(end))
        || last == "CUDAOutOfMemory"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exceptions_are_read_from_lines() {
        let name = |line| raised(line).map(|found| (found.name, found.embedded));
        assert_eq!(name("ValueError: bad"), Some(("ValueError", false)));
        assert_eq!(name("torch.cuda.OutOfMemoryError: CUDA"), Some(("torch.cuda.OutOfMemoryError", false)));
        assert_eq!(name("AssertionError"), Some(("AssertionError", false)));
        assert_eq!(name("Exit code: 1. stderr: RuntimeError: No"), Some(("RuntimeError", true)));
        assert_eq!(name("srun: error: node: task 1"), None);
        assert_eq!(name("  | ExceptionGroup: unhandled (2 sub-exceptions)"), Some(("ExceptionGroup", false)));
        assert_eq!(name("no Error here"), None);
        assert_eq!(name(""), None);
    }

    #[test]
    fn frames_know_libraries() {
        let user = frame("  File \"/home/a/train.py\", line 3, in main").expect("a frame");
        assert_eq!((user.function.as_str(), user.in_library()), ("main", false));
        let library =
            frame("File \"/v/lib/python3.11/site-packages/torch/x.py\", line 3, in f").expect("a frame");
        assert!(library.in_library());
        assert_eq!(frame("File \"x\" is missing"), None);
    }
}
