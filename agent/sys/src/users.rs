//! The names of users.

/// The name of a user in the host's own file. Other sources, such as a directory service, may not answer.
pub fn name(uid: u32) -> Option<String> {
    let file = std::fs::read_to_string("/etc/passwd").ok()?;
    let of = |line: &str| {
        let mut fields = line.split(':');
        let (name, number) = (fields.next()?, fields.nth(1)?);
        (number.parse() == Ok(uid)).then(|| name.to_owned())
    };
    file.lines().find_map(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_has_a_name_and_a_number_that_is_not_in_the_file_has_none() {
        assert_eq!(name(0).as_deref(), Some("root"));
        assert_eq!(name(u32::MAX - 7), None);
    }
}
