//! What the name of a value says about it.

/// What kind of secret a name is the name of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A header whose value is a secret: `Cookie`, `Authorization`.
    Header,
    /// The value is a secret, whatever it looks like.
    Password,
    /// `pass`, `pwd`: also numbers of tests and directories.
    Pass,
    /// `token`: also a number of tokens.
    Token,
    /// `key`: also a name.
    Key,
    /// The signature of an address.
    Signature,
}

/// Parts of names whose value is a secret. Words are joined, so that `access_key` and `AccessKey` are found.
const PASSWORDS: [&str; 17] = [
    "password",
    "passwd",
    "passphrase",
    "passcode",
    "secret",
    "apikey",
    "accesskey",
    "privatekey",
    "accountkey",
    "authkey",
    "signingkey",
    "encryptionkey",
    "licensekey",
    "wandbkey",
    "cometkey",
    "ngckey",
    "authtoken",
];

/// Last words of names of values that are no secrets, such as files with secrets and limits.
const OF_OTHERS: [&str; 22] = [
    "file",
    "path",
    "dir",
    "directory",
    "type",
    "len",
    "length",
    "count",
    "size",
    "limit",
    "ttl",
    "budget",
    "embedding",
    "embeddings",
    "name",
    "url",
    "uri",
    "endpoint",
    "index",
    "idx",
    "error",
    "expires",
];

/// Words in names of tokens of a text.
const OF_TEXT: [&str; 26] = [
    "pad", "eos", "bos", "unk", "sep", "cls", "mask", "special", "max", "min", "num", "new", "total",
    "prompt", "image", "padding", "start", "end", "per", "avg", "stop", "seq", "text", "audio", "video",
    "id",
];

/// Words in names of keys that find a value.
const OF_LOOKUP: [&str; 24] = [
    "public",
    "primary",
    "foreign",
    "sort",
    "cache",
    "image",
    "text",
    "caption",
    "data",
    "batch",
    "dict",
    "map",
    "lookup",
    "partition",
    "group",
    "query",
    "hash",
    "label",
    "input",
    "output",
    "state",
    "object",
    "column",
    "json",
];

/// Words in names of options whose values may look random.
const OF_ORDINARY_OPTIONS: [&str; 46] = [
    "id",
    "uuid",
    "commit",
    "revision",
    "rev",
    "sha",
    "sha1",
    "sha256",
    "hash",
    "md5",
    "digest",
    "checksum",
    "git",
    "ref",
    "tag",
    "version",
    "image",
    "name",
    "host",
    "hosts",
    "node",
    "nodes",
    "path",
    "file",
    "dir",
    "device",
    "devices",
    "gpu",
    "gpus",
    "run",
    "fingerprint",
    "seed",
    "url",
    "uri",
    "endpoint",
    "addr",
    "address",
    "model",
    "dataset",
    "data",
    "resume",
    "ckpt",
    "checkpoint",
    "job",
    "exp",
    "experiment",
];

/// The words of a name in small letters: `clientSecret`, `client-secret` and `client.secret` have two.
fn words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut before = '_';
    for letter in name.chars() {
        if matches!(letter, '_' | '-' | '.') || before.is_ascii_lowercase() && letter.is_ascii_uppercase() {
            words.push(String::new());
        }
        if letter.is_ascii_alphanumeric()
            && let Some(word) = words.last_mut()
        {
            word.push(letter.to_ascii_lowercase());
        }
        before = letter;
    }
    words.retain(|word| !word.is_empty());
    words
}

/// The kind of secret that the name belongs to, if any.
pub(super) fn kind(name: &str) -> Option<Kind> {
    let words = words(name);
    let has = |list: &[&str]| words.iter().any(|word| list.contains(&word.as_str()));
    let last = words.last()?;
    if OF_OTHERS.contains(&last.as_str()) {
        return None;
    }
    let joined = words.concat();
    if has(&["authorization", "cookie", "cookies"]) {
        return Some(Kind::Header);
    }
    if PASSWORDS.iter().any(|part| joined.contains(part)) {
        return Some(Kind::Password);
    }
    if has(&["pass", "pwd", "pw"]) {
        return Some(Kind::Pass);
    }
    if (has(&["token", "jwt", "bearer", "pat", "auth"]) || joined.contains("credential")) && !has(&OF_TEXT) {
        return Some(Kind::Token);
    }
    if last == "key" && !has(&OF_LOOKUP) {
        return Some(Kind::Key);
    }
    has(&["sig", "signature"]).then_some(Kind::Signature)
}

/// Whether the values of an option may look random and are no secrets.
pub(super) fn is_ordinary_option(name: &str) -> bool {
    words(name).iter().any(|word| OF_ORDINARY_OPTIONS.contains(&word.as_str()))
}
