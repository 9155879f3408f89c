//! Masks secrets in texts that leave the host. Recognises them by their form, by the name before them, and by their
//! randomness if they are the value of an option.

mod found;
mod name;
#[cfg(test)]
mod tests;

use std::sync::LazyLock;

use regex::{Captures, Regex};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use found::{Found, Separator, values};
use name::{Kind, is_ordinary_option, kind};

/// The replacement for a secret.
const COVER: &str = "<masked>";

/// Tokens with a known form: of Hugging Face, OpenAI and similar services, AWS, GitHub, GitLab, Slack, Google, Azure,
/// package registries, and others; JSON in Base64, such as JSON web tokens.
const FORMS: &str = r"(?x)
    (?-u:\b)(?: hf_[A-Za-z0-9]{16,} | api_org_[A-Za-z0-9]{16,} | wandb_v1_[A-Za-z0-9_]{16,}
    | sk-[A-Za-z0-9_-]{16,} | [srp]k_(?:live|test)_[A-Za-z0-9]{16,} | gsk_[A-Za-z0-9]{16,}
    | xai-[A-Za-z0-9]{16,} | pplx-[A-Za-z0-9]{16,} | r8_[A-Za-z0-9]{16,} | nvapi-[A-Za-z0-9_-]{16,}
    | (?:AKIA|ASIA)[0-9A-Z]{16}
    | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_[A-Za-z0-9_]{20,} | gl(?:pat|rt|dt|cbt|ptt)-[A-Za-z0-9_-]{16,}
    | ATATT3[A-Za-z0-9_=-]{16,} | ATBB[A-Za-z0-9]{20,}
    | xox[abeprs]-[A-Za-z0-9-]{10,} | xapp-[A-Za-z0-9-]{10,}
    | AIza[0-9A-Za-z_-]{30,} | ya29\.[0-9A-Za-z_-]{16,} | GOCSPX-[0-9A-Za-z_-]{16,} | 1//0[0-9A-Za-z_-]{30,}
    | [A-Za-z0-9_~.-]{3}[0-9]Q~[A-Za-z0-9_~.-]{31,}
    | dckr_pat_[A-Za-z0-9_-]{16,} | npm_[A-Za-z0-9]{20,} | pypi-[A-Za-z0-9_-]{16,}
    | SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,} | dapi[0-9a-f]{32} | hv[sb]\.[A-Za-z0-9_-]{20,}
    | do[opr]_v1_[0-9a-f]{32,} | gl(?:sa|c)_[A-Za-z0-9_=]{20,} | pcsk_[A-Za-z0-9_]{20,}
    | [0-9]{8,10}:AA[A-Za-z0-9_-]{33} | AGE-SECRET-KEY-1[0-9A-Z]{20,}
    | eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*|[A-Za-z0-9_-]{24,}={0,2}) )";

/// The lines of a private key.
const PRIVATE_KEY: &str =
    r"-----BEGIN[A-Z ]*PRIVATE KEY[A-Z ]*-----(?s:.)*?(?:-----END[A-Z ]*PRIVATE KEY[A-Z ]*-----|\z)";

/// `https://user:password@host`, where the user may be empty and the password may contain an `@`.
const PASSWORD_IN_ADDRESS: &str =
    r#"(?P<name>[A-Za-z][A-Za-z0-9+.-]*://[^\s/:@"'<>]*:)(?P<value>[^\s/"'<>]+)(?P<end>@)"#;

/// `https://TOKEN@host`. Names of users are shorter.
const TOKEN_IN_ADDRESS: &str =
    r#"(?P<name>[A-Za-z][A-Za-z0-9+.-]*://)(?P<value>[^\s/:@"'<>]{16,})(?P<end>@)"#;

/// Addresses whose path is the secret.
const SECRET_PATH: &str = r#"(?x)(?P<name>hooks\.slack\.com/[a-z]+/ | discord(?:app)?\.com/api/webhooks/
    | \.webhook\.office\.com/ | api\.telegram\.org/bot)(?P<value>[^\s"'<>]+)(?P<end>)"#;

/// `Bearer …` and `Basic …` without a header's name before them.
const SCHEME: &str =
    r"(?P<name>(?-u:\b)(?i-u:bearer|basic)[ \t]+)(?P<value>[A-Za-z0-9._~+/-]{8,}=*)(?P<end>)";

/// `curl -u user:password`.
const USER_OPTION: &str =
    r#"(?P<name>(?:^|[\s"'])(?:-u|--user|--proxy-user)[ =]+["']?[^\s:"'<>]+:)(?P<value>[^\s"'<>]+)(?P<end>)"#;

/// A key of Weights & Biases has no prefix.
const FORTY_DIGITS: &str = r"(?-u:\b)[0-9a-f]{40}(?-u:\b)";

/// Names that may be those of a secret. [`kind`] decides.
const NAMES: &str =
    r"(?i-u)[a-z0-9_.-]*(?:pass|pwd|pw|secret|token|key|cred|auth|cookie|sig|jwt|bearer|pat)[a-z0-9_.-]*";

/// Options of a command line.
const OPTIONS: &str = r"--?[A-Za-z][A-Za-z0-9_.-]*";

/// A text is masked again for as long as that finds more, at most this often.
const MAX_PASSES: usize = 8;

struct Patterns {
    private_key: Regex,
    forms: Regex,
    named_by_context: [Regex; 5],
    forty_digits: Regex,
    names: Regex,
    options: Regex,
}

static PATTERNS: LazyLock<Option<Patterns>> = LazyLock::new(|| {
    let compiled = |pattern| Regex::new(pattern).ok();
    Some(Patterns {
        private_key: compiled(PRIVATE_KEY)?,
        forms: compiled(FORMS)?,
        named_by_context: [
            compiled(PASSWORD_IN_ADDRESS)?,
            compiled(TOKEN_IN_ADDRESS)?,
            compiled(SECRET_PATH)?,
            compiled(SCHEME)?,
            compiled(USER_OPTION)?,
        ],
        forty_digits: compiled(FORTY_DIGITS)?,
        names: compiled(NAMES)?,
        options: compiled(OPTIONS)?,
    })
});

/// Masks the secrets in a text. The number of its lines stays the same.
pub fn mask(text: &str) -> String {
    // The patterns are constants that the tests compile. Without them the whole text is masked.
    let Some(patterns) = PATTERNS.as_ref() else { return COVER.to_owned() };
    let mut text = masked_once(text, patterns);
    // What is masked may end another secret, which was part of a longer word before.
    for _ in 1..MAX_PASSES {
        let again = masked_once(&text, patterns);
        if again == text {
            break;
        }
        text = again;
    }
    text
}

fn masked_once(text: &str, patterns: &Patterns) -> String {
    let key = |found: &Captures<'_>| {
        let covered = found[0].split('\n').map(|line| if line.is_empty() { "" } else { COVER });
        covered.collect::<Vec<_>>().join("\n")
    };
    let mut text = patterns.private_key.replace_all(text, key).into_owned();
    text = patterns.forms.replace_all(&text, COVER).into_owned();
    for pattern in &patterns.named_by_context {
        let covered = |found: &Captures<'_>| match is_prose(&found["name"], &found["value"]) {
            true => found[0].to_owned(),
            false => format!("{}{COVER}{}", &found["name"], &found["end"]),
        };
        text = pattern.replace_all(&text, covered).into_owned();
    }
    text = without_bare_keys(&text, &patterns.forty_digits);
    text = covered(&text, values(&text, &patterns.names).filter(is_named_secret));
    covered(&text, values(&text, &patterns.options).filter(is_random_option))
}

/// Replaces what was found. The values are in order.
fn covered<'t>(text: &str, secrets: impl Iterator<Item = Found<'t>>) -> String {
    let mut masked = String::with_capacity(text.len());
    let mut done = 0;
    for Found { range, .. } in secrets {
        if range.start >= done {
            masked.push_str(&text[done..range.start]);
            masked.push_str(COVER);
            done = range.end;
        }
    }
    masked.push_str(&text[done..]);
    masked
}

/// After `bearer` and `basic`, words of a sentence are no secrets.
fn is_prose(name: &str, value: &str) -> bool {
    name.ends_with([' ', '\t']) && !name.contains(['-', ':']) && !is_like_token(value, 8)
}

/// Forty hexadecimal digits that are a word of their own: a key, unless the line is about a commit or a checksum.
fn without_bare_keys(text: &str, pattern: &Regex) -> String {
    const OF_HASHES: [&str; 9] =
        ["commit", "sha", "git", "rev", "hash", "digest", "checksum", "head", "snapshot"];
    let mut masked = String::with_capacity(text.len());
    let mut done = 0;
    for found in pattern.find_iter(text) {
        let (before, after) = (&text[..found.start()], &text[found.end()..]);
        let line = before.rsplit('\n').next().unwrap_or_default();
        // As much of the line as is read by this, on a border of characters.
        let near: String = line.chars().rev().take(48).collect::<Vec<_>>().into_iter().rev().collect();
        let near = near.to_lowercase();
        let is_part = near.ends_with(['/', '@', '-', '.', '_', '~', '#', '=', '+'])
            || after.starts_with(['/', '@', '-', '.', '_', '~']);
        // `sha1sum` prints the file after two blanks.
        if is_part || after.starts_with("  ") || OF_HASHES.iter().any(|word| near.contains(word)) {
            continue;
        }
        masked.push_str(&text[done..found.start()]);
        masked.push_str(COVER);
        done = found.end();
    }
    masked.push_str(&text[done..]);
    masked
}

/// Values that say that there is no secret.
fn is_unset(value: &str) -> bool {
    const UNSET: [&str; 9] = ["none", "null", "nil", "true", "false", "undefined", "unset", "default", "***"];
    UNSET.iter().any(|unset| value.eq_ignore_ascii_case(unset))
}

fn is_number(value: &str) -> bool {
    value.parse::<f64>().is_ok() || value.trim_end_matches(['%', 'k', 'M', 'G']).parse::<f64>().is_ok()
}

/// Whether letters and digits are mixed as in a token, in at least `length` characters.
fn is_like_token(value: &str, length: usize) -> bool {
    value.len() >= length
        && value.bytes().any(|letter| letter.is_ascii_digit())
        && value.bytes().any(|letter| letter.is_ascii_alphabetic())
}

/// Whether the name before the value is that of a secret, and the value can be one.
fn is_named_secret(found: &Found<'_>) -> bool {
    let Found { value, separator, is_option, .. } = *found;
    let Some(kind) = kind(found.name).filter(|_| !is_unset(value)) else { return false };
    let is_quoted = found.is_quoted;
    let is_assigned = separator == Separator::Equals || is_option;
    match kind {
        Kind::Header => separator != Separator::Blank,
        Kind::Password => match separator {
            Separator::Blank if !is_option => is_like_token(value, 16) || found.follows_login,
            _ => true,
        },
        Kind::Pass if is_number(value) || value.starts_with('/') => false,
        Kind::Pass => is_assigned || is_quoted || separator == Separator::Colon && is_like_token(value, 6),
        Kind::Token if is_number(value) => false,
        Kind::Token => match separator {
            _ if is_assigned => value.len() >= 4,
            Separator::Colon => is_quoted && value.len() >= 4 || value.len() >= 16 || is_like_token(value, 6),
            _ => is_like_token(value, 16),
        },
        Kind::Key if is_number(value) || value.starts_with(['/', '.', '~']) => false,
        Kind::Key => is_option && value.len() >= 6 || is_like_token(value, 16),
        Kind::Signature => separator == Separator::Equals && is_like_token(value, 16),
    }
}

/// Whether the value of an option with any name is random enough to be a secret.
fn is_random_option(found: &Found<'_>) -> bool {
    found.is_option && !is_ordinary_option(found.name) && is_random(found.value)
}

/// Whether a word consists of random digits and letters: hexadecimal or Base64. Names of files, models and hosts
/// change less often between small letters, capital letters and digits.
fn is_random(value: &str) -> bool {
    const SEPARATORS: [char; 8] = ['-', '_', '.', '/', '+', '~', '%', '='];
    let body = value.trim_end_matches('=');
    let is_path = value.starts_with(['/', '.', '~']) || value.contains("://");
    let is_of_form =
        body.chars().all(|letter| letter.is_ascii_alphanumeric() || SEPARATORS.contains(&letter));
    if body.len() < 20 || is_path || !is_of_form || has_uuid(body) || !is_like_token(body, 20) {
        return false;
    }
    let class = |letter: u8| match letter {
        b'0'..=b'9' => 1,
        b'a'..=b'z' => 2,
        b'A'..=b'Z' => 3,
        _ => 0,
    };
    let separators = body.bytes().filter(|letter| class(*letter) == 0).count();
    let letters = body.len() - separators;
    let changes = body
        .as_bytes()
        .windows(2)
        .filter(|pair| class(pair[0]) != class(pair[1]) && class(pair[0]) * class(pair[1]) != 0)
        .count();
    let has = |of| body.bytes().any(|letter| class(letter) == of);
    let looks_named = body.contains(['-', '_', '.']) && !(has(2) && has(3));
    letters >= 20 && separators * 8 <= body.len() && !looks_named && changes * 10 >= letters * 3
}

/// Whether there is an UUID, such as that of a GPU.
fn has_uuid(value: &str) -> bool {
    let groups: Vec<&str> = value.split('-').collect();
    groups.windows(5).any(|groups| {
        let lengths = groups.iter().map(|group| group.len());
        let is_hex = |group: &&str| group.bytes().all(|letter| letter.is_ascii_hexdigit());
        lengths.eq([8, 4, 4, 4, 12]) && groups.iter().all(is_hex)
    })
}

/// Masks secrets in all texts of a JSON value. Keys are kept.
pub fn mask_json(value: &mut Value) {
    match value {
        Value::String(text) => {
            let masked = mask(text);
            if masked != *text {
                *text = masked;
            }
        }
        Value::Array(values) => mask_array(values),
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(text) if is_named_secret(&Found::field(name, text)) => {
                        COVER.clone_into(text);
                    }
                    value => mask_json(value),
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn mask_array(values: &mut [Value]) {
    let texts: Option<Vec<&str>> = values.iter().map(Value::as_str).collect();
    match texts.map(|texts| masked_list(&texts)) {
        Some(masked) => values.iter_mut().zip(masked).for_each(|(value, masked)| *value = masked.into()),
        None => values.iter_mut().for_each(mask_json),
    }
}

/// Masks secrets in a list of texts: the lines of one text, or the words of a command line.
pub fn mask_list(texts: &mut [String]) {
    let masked = masked_list(&texts.iter().map(String::as_str).collect::<Vec<_>>());
    texts.iter_mut().zip(masked).for_each(|(text, masked)| *text = masked);
}

fn masked_list(texts: &[&str]) -> Vec<String> {
    let mut masked: Vec<String> = Vec::with_capacity(texts.len());
    let whole = mask(&texts.join("\n"));
    let mut lines = whole.split('\n');
    for text in texts {
        let own: Vec<&str> = lines.by_ref().take(text.split('\n').count()).collect();
        masked.push(own.join("\n"));
    }
    for at in 0..masked.len() {
        let word = &masked[at];
        if word.contains(char::is_whitespace) {
            continue;
        }
        let is_option = word.starts_with('-');
        if word.contains('=') && !is_option {
            // `trainer.key=VALUE`, as for Hydra.
            if let Some(covered) = mask(&format!("--{word}")).strip_prefix("--") {
                masked[at] = covered.to_owned();
            }
        } else if is_option && let Some(next) = masked.get(at + 1).filter(|next| !next.starts_with('-')) {
            // `--token` and its value are two words.
            let pair = mask(&format!("{word} {next}"));
            if let Some(covered) = pair.strip_prefix(word).and_then(|rest| rest.strip_prefix(' ')) {
                // The value may be several words.
                masked[at + 1] = if covered.starts_with(COVER) { COVER } else { covered }.to_owned();
            }
        }
    }
    masked
}

/// The same value without the secrets in its texts.
///
/// # Errors
/// It has no JSON form, or a text in it may not be masked.
pub fn masked<T: Serialize + DeserializeOwned>(value: &T) -> serde_json::Result<T> {
    let mut json = serde_json::to_value(value)?;
    mask_json(&mut json);
    serde_json::from_value(json)
}
