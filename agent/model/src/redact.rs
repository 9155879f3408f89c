//! Masks secrets in texts that leave the host. Recognises them by their form or by the name before them.

use std::sync::LazyLock;

use regex::{Captures, Regex};
use serde_json::Value;

/// The replacement for a secret.
const COVER: &str = "<masked>";

/// Tokens with a known form: of Hugging Face, OpenAI and similar services, AWS, GitHub, GitLab, Slack, Google; JSON web tokens and
/// private keys.
const FORMS: &str = r"(?x)
    (?-u:\b)(?: hf_[A-Za-z0-9]{16,} | sk-[A-Za-z0-9_-]{16,} | (?:AKIA|ASIA)[0-9A-Z]{16}
    | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_[A-Za-z0-9_]{20,} | glpat-[A-Za-z0-9_-]{16,}
    | xox[abprs]-[A-Za-z0-9-]{10,} | AIza[0-9A-Za-z_-]{30,} | ya29\.[0-9A-Za-z_-]{16,}
    | eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]* )
    | -----BEGIN[A-Z\ ]*PRIVATE\ KEY-----(?s:.)*?(?:-----END[A-Z\ ]*PRIVATE\ KEY-----|\z)";

/// `password=…`, `"api_key": "…"`, `--token …`, `Authorization: Bearer …`.
const NAMED_SECRET: &str = r#"(?x)
    (?P<name>[A-Za-z0-9_-]*
      (?i-u:passw(?:or)?d|passphrase|secret|token|api[_-]?key|access[_-]?key|credential|authorization)
      [A-Za-z0-9_-]*["']?[\ \t]*(?:[:=][\ \t]*|[\ \t])["']?(?i-u:(?:bearer|basic)[\ \t]+)?)
    (?P<value>[^\ \t\r\n"',;&}\])]{6,})"#;

/// `https://user:password@host`.
const IN_ADDRESS: &str = r"(?P<name>[a-z][a-z0-9+.-]*://[^ \t\r\n/:@]+:)(?P<value>[^ \t\r\n/@]+)@";

struct Patterns {
    forms: Regex,
    named: Regex,
    in_address: Regex,
}

static PATTERNS: LazyLock<Option<Patterns>> = LazyLock::new(|| {
    Some(Patterns {
        forms: Regex::new(FORMS).ok()?,
        named: Regex::new(NAMED_SECRET).ok()?,
        in_address: Regex::new(IN_ADDRESS).ok()?,
    })
});

/// Masks the secrets in a text.
pub fn mask(text: &str) -> String {
    // The patterns are constants that the tests compile. Without them the whole text is masked.
    let Some(patterns) = PATTERNS.as_ref() else { return COVER.to_owned() };
    let text = patterns.forms.replace_all(text, COVER);
    let text =
        patterns.in_address.replace_all(&text, |found: &Captures<'_>| format!("{}{COVER}@", &found["name"]));
    let named = |found: &Captures<'_>| match is_word(&found["name"], &found["value"]) {
        true => found[0].to_owned(),
        false => format!("{}{COVER}", &found["name"]),
    };
    patterns.named.replace_all(&text, named).into_owned()
}

/// Text about tokens is no secret: a value separated from its name only by a blank must look like a token.
fn is_word(name: &str, value: &str) -> bool {
    let parted_by_blank = name.ends_with(char::is_whitespace) && !name.contains([':', '=']);
    let is_option = name.trim_start().starts_with("--") || name.to_ascii_lowercase().contains("bearer");
    parted_by_blank
        && !(is_option || value.chars().any(|letter| letter.is_ascii_digit()) && value.len() >= 16)
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
        Value::Array(values) => {
            // On a command line, `--token` and its value are two words.
            for at in 0..values.len().saturating_sub(1) {
                let names_secret = values[at].as_str().is_some_and(|word| {
                    word.starts_with("--")
                        && !word.contains('=')
                        && mask(&format!("{word} x1x1x1x1x1x1x1x1")).contains(COVER)
                });
                if names_secret && values[at + 1].as_str().is_some_and(|word| !word.starts_with('-')) {
                    values[at + 1] = Value::String(COVER.to_owned());
                }
            }
            values.iter_mut().for_each(mask_json);
        }
        Value::Object(fields) => fields.values_mut().for_each(mask_json),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn secrets_are_masked_by_form_and_by_name() {
        let check = |text: &str, masked: &str| assert_eq!(mask(text), masked);
        check("401 for hf_AbCdEfGhIjKlMnOpQrSt at", "401 for <masked> at");
        check("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "AWS_SECRET_ACCESS_KEY=<masked>");
        check(r#"{"api_key": "0123456789abcdef"}"#, r#"{"api_key": "<masked>"}"#);
        check("Authorization: Bearer abc.def-123456", "Authorization: Bearer <masked>");
        check("postgres://train:hunter22@db/runs", "postgres://train:<masked>@db/runs");
        check("key AKIAABCDEFGHIJKLMNOP used", "key <masked> used");
        check("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n", "<masked>");
    }

    #[test]
    fn other_text_is_kept() {
        for text in [
            "RuntimeError: token indices sequence length is longer than 1024",
            "tokens per second: 51233.7",
            "the tokenizer was not found",
            "NVRM: Xid (PCI:0000:3b:00): 79, pid=812, name=python, GPU has fallen off the bus.",
            "File \"/home/user/train.py\", line 12, in <module>",
            "secret sauce of the optimizer",
        ] {
            assert_eq!(mask(text), text);
        }
    }

    #[test]
    fn values_of_options_are_masked_on_a_command_line() {
        let mut line = serde_json::json!([
            "train.py",
            "--wandb-token",
            "shortone",
            "--lr",
            "0.1",
            "--api-key=abcdef123"
        ]);
        mask_json(&mut line);
        assert_eq!(
            line,
            serde_json::json!(["train.py", "--wandb-token", "<masked>", "--lr", "0.1", "--api-key=<masked>"])
        );
    }

    proptest! {
        #[test]
        fn masking_is_idempotent(text in "\\PC{0,80}") {
            let once = mask(&text);
            prop_assert_eq!(mask(&once), once);
        }
    }
}
