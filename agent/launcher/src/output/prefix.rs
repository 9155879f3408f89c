//! Macros in the prefix of the ranks' lines, as in torchrun's `TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE`: `${rank}` or
//! `$rank`, and `$$` for a dollar sign. Unknown macros are kept unchanged.

/// Replaces each macro of `template` by what `value` returns for its name.
pub(crate) fn expand(template: &str, value: impl Fn(&str) -> Option<String>) -> String {
    let mut text = String::new();
    let mut rest = template;
    while let Some(at) = rest.find('$') {
        text.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        if let Some(left) = after.strip_prefix('$') {
            text.push('$');
            rest = left;
            continue;
        }
        match name_of(after).and_then(|(name, length)| Some((value(name)?, length))) {
            Some((value, length)) => {
                text.push_str(&value);
                rest = &after[length..];
            }
            None => {
                text.push('$');
                rest = after;
            }
        }
    }
    text.push_str(rest);
    text
}

/// The name at the start of the text after a dollar sign, and the number of bytes of the macro.
fn name_of(after: &str) -> Option<(&str, usize)> {
    let braced = after.strip_prefix('{');
    let text = braced.unwrap_or(after);
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
    match braced {
        Some(inside) => inside[end..].starts_with('}').then_some((&inside[..end], end + 2)),
        None => Some((&text[..end], end)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(template: &str) -> String {
        expand(template, |name| match name {
            "rank" => Some("3".to_owned()),
            "role_name" => Some("trainer".to_owned()),
            _ => None,
        })
    }

    #[test]
    fn macros_are_those_of_torchrun() {
        assert_eq!(expanded("[${role_name}${rank}]:"), "[trainer3]:");
        assert_eq!(expanded("[rank$rank]: "), "[rank3]: ");
        assert_eq!(expanded("$$rank ${unknown} ${rank"), "$rank ${unknown} ${rank");
        assert_eq!(expanded("é$"), "é$");
    }
}
