//! Expands Slurm's host lists, such as `node[01-03,7],login1`.

/// More hosts than any job has. A longer list is refused before it uses too much memory.
const MAX_HOSTS: usize = 1 << 17;

/// Why a text is no host list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostlistError {
    /// A host name is empty.
    #[error("a host has no name")]
    Empty,
    /// `[` without `]`, or vice versa.
    #[error("{0:?}: each [ needs its ]")]
    Brackets(String),
    /// The text in brackets is neither a number nor a range of numbers.
    #[error("[{0}]: write numbers and ranges such as [01-03,7]")]
    Range(String),
    /// More hosts than a job can have.
    #[error("more than {MAX_HOSTS} hosts")]
    TooMany,
}

/// The hosts of a list, in order. Numbers keep their leading zeros.
///
/// # Errors
/// If the text is no host list.
pub fn expand(text: &str) -> Result<Vec<String>, HostlistError> {
    let mut hosts = Vec::new();
    for word in split_list(text)? {
        let room = MAX_HOSTS - hosts.len();
        hosts.extend(names(word, room)?);
    }
    Ok(hosts)
}

/// Splits the list at commas outside of brackets.
fn split_list(text: &str) -> Result<Vec<&str>, HostlistError> {
    let mut words = Vec::new();
    let (mut from, mut is_inside) = (0, false);
    for (at, letter) in text.char_indices() {
        match (letter, is_inside) {
            ('[', false) => is_inside = true,
            (']', true) => is_inside = false,
            ('[', true) | (']', false) => return Err(HostlistError::Brackets(text.to_owned())),
            (',', false) => {
                words.push(&text[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    if is_inside {
        return Err(HostlistError::Brackets(text.to_owned()));
    }
    words.push(&text[from..]);
    let words: Vec<&str> = words.into_iter().map(str::trim).collect();
    if words.iter().any(|word| word.is_empty()) { Err(HostlistError::Empty) } else { Ok(words) }
}

/// The names of one word, in which each pair of brackets contains a list of numbers.
fn names(word: &str, room: usize) -> Result<Vec<String>, HostlistError> {
    let mut names = vec![String::new()];
    let mut rest = word;
    while let Some((before, after)) = rest.split_once('[') {
        let (inside, behind) =
            after.split_once(']').ok_or_else(|| HostlistError::Brackets(word.to_owned()))?;
        let numbers = numbers(inside, room)?;
        if names.len().saturating_mul(numbers.len()) > room {
            return Err(HostlistError::TooMany);
        }
        let all = names.iter().flat_map(|name| numbers.iter().map(move |n| format!("{name}{before}{n}")));
        names = all.collect();
        rest = behind;
    }
    if names.len() > room {
        return Err(HostlistError::TooMany);
    }
    names.iter_mut().for_each(|name| name.push_str(rest));
    Ok(names)
}

/// Expands `01-03,7` to 01, 02, 03 and 7.
fn numbers(inside: &str, room: usize) -> Result<Vec<String>, HostlistError> {
    let wrong = || HostlistError::Range(inside.to_owned());
    let number = |text: &str| {
        let is_number = !text.is_empty() && text.bytes().all(|letter| letter.is_ascii_digit());
        is_number.then(|| text.parse::<u64>().ok()).flatten().ok_or_else(wrong)
    };
    let mut numbers = Vec::new();
    for part in inside.split(',').map(str::trim) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (from, to) = (number(first)?, number(last)?);
        if from > to {
            return Err(wrong());
        }
        if to - from >= (room - numbers.len().min(room)) as u64 {
            return Err(HostlistError::TooMany);
        }
        let width = first.len();
        numbers.extend((from..=to).map(|number| format!("{number:0width$}")));
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn slurm_lists_are_expanded() {
        for (text, hosts) in [
            ("login1", "login1"),
            ("node[01-03,7],login1", "node01 node02 node03 node7 login1"),
            ("gpu[8-11]", "gpu8 gpu9 gpu10 gpu11"),
            ("n[098-101]-ib", "n098-ib n099-ib n100-ib n101-ib"),
            ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
            ("a-1.example.org, b", "a-1.example.org b"),
        ] {
            let hosts: Vec<&str> = hosts.split(' ').collect();
            assert_eq!(expand(text).expect(text), hosts, "{text}");
        }
    }

    #[test]
    fn invalid_lists_are_refused_with_a_reason() {
        for text in ["", "a,,b"] {
            assert_eq!(expand(text), Err(HostlistError::Empty), "{text}");
        }
        for text in ["a[1", "a]1[", "a[1[2]]"] {
            assert_eq!(expand(text), Err(HostlistError::Brackets(text.to_owned())), "{text}");
        }
        for range in ["", "x", "3-1", "+1"] {
            assert_eq!(expand(&format!("a[{range}]")), Err(HostlistError::Range(range.to_owned())));
        }
        for text in ["a[0-4000000000]", "a[0-999][0-999]", "a[0-99999],b[0-99999]"] {
            assert_eq!(expand(text), Err(HostlistError::TooMany), "{text}");
        }
    }

    /// A list, and the hosts that it consists of.
    fn list() -> impl Strategy<Value = (String, Vec<String>)> {
        let range = (0u64..2_000, 0u64..12, 0usize..5);
        let word = ("[a-z][a-z.-]{0,6}", proptest::collection::vec(range, 0..4), "(-ib)?");
        proptest::collection::vec(word, 1..5).prop_map(|words| {
            let (mut texts, mut hosts) = (Vec::new(), Vec::new());
            for (name, ranges, suffix) in words {
                if ranges.is_empty() {
                    texts.push(format!("{name}{suffix}"));
                    hosts.push(format!("{name}{suffix}"));
                    continue;
                }
                let mut parts = Vec::new();
                for (from, more, width) in ranges {
                    let first = format!("{from:0width$}");
                    let width = first.len();
                    parts.push(match more {
                        0 => first,
                        more => format!("{first}-{:0width$}", from + more),
                    });
                    hosts.extend((from..=from + more).map(|n| format!("{name}{n:0width$}{suffix}")));
                }
                texts.push(format!("{name}[{}]{suffix}", parts.join(",")));
            }
            (texts.join(","), hosts)
        })
    }

    proptest! {
        #[test]
        fn a_list_expands_to_its_hosts((text, hosts) in list()) {
            prop_assert_eq!(expand(&text), Ok(hosts.clone()));
            prop_assert_eq!(expand(&hosts.join(",")), Ok(hosts), "names are their own list");
        }

        #[test]
        fn any_text_expands_to_a_bounded_list(text in "[a-c0-9,\\[\\]-]{0,40}") {
            if let Ok(hosts) = expand(&text) {
                prop_assert!((1..=MAX_HOSTS).contains(&hosts.len()));
                prop_assert!(hosts.iter().all(|host| !host.contains(['[', ']', ','])));
            }
        }
    }
}
