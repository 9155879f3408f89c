//! The keys as users see them: dotted, documented, with their defaults.

use std::fmt::Write;

use mainstay_model::units::Field;

use super::Config;

/// The prefix of the agent's environment variables. Those of launchers and clients do not have it.
pub(super) const PREFIX: &str = "MAINSTAY_AGENT_";

/// The variable that names the configuration file itself.
pub(super) const FILE_VARIABLE: &str = "MAINSTAY_AGENT_CONFIG";

/// A key of the configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Key {
    /// Dotted: `journal.max_size`.
    pub name: String,
    /// What it means.
    pub doc: String,
    /// Its default.
    pub default: toml::Value,
}

impl Key {
    /// Whether it is in the table of limits.
    pub fn is_limit(&self) -> bool {
        self.name.starts_with("limits.")
    }
}

/// All keys, in the order of the documentation.
pub fn keys() -> Vec<Key> {
    let defaults = defaults();
    let mut keys = Vec::new();
    collect(Config::FIELDS, "", &defaults, &mut keys);
    keys
}

/// The environment variable of a key: `MAINSTAY_AGENT_JOURNAL_MAX_SIZE`.
pub fn environment_name(key: &str) -> String {
    format!("{PREFIX}{}", key.replace('.', "_").to_uppercase())
}

/// The default configuration as TOML.
pub(super) fn defaults() -> toml::Table {
    toml::Table::try_from(Config::default()).unwrap_or_default()
}

fn collect(fields: &[Field], prefix: &str, defaults: &toml::Table, keys: &mut Vec<Key>) {
    for field in fields {
        let name = format!("{prefix}{}", field.name);
        match (field.section, defaults.get(field.name)) {
            (Some(section), Some(toml::Value::Table(defaults))) => {
                collect(section, &format!("{name}."), defaults, keys);
            }
            (None, Some(default)) => {
                let doc = field.doc.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
                keys.push(Key { name, doc, default: default.clone() });
            }
            (_, _) => {}
        }
    }
}

pub(super) fn commented_default() -> String {
    let mut text = String::from(
        "# Configuration of the Mainstay agent. Every key is shown with its default; take away the # to choose another.\n\
         # Environment variables (MAINSTAY_AGENT_JOURNAL_MAX_SIZE for journal.max_size) override this file, flags\n\
         # override both.\n",
    );
    write_section(Config::FIELDS, "", &defaults(), &mut text);
    text
}

fn write_section(fields: &[Field], prefix: &str, defaults: &toml::Table, text: &mut String) {
    let shown = fields.iter().filter(|field| defaults.contains_key(field.name));
    for field in shown {
        let _ = writeln!(text);
        for line in field.doc {
            let _ = writeln!(text, "# {}", line.trim());
        }
        match (field.section, defaults.get(field.name)) {
            (Some(section), Some(toml::Value::Table(defaults))) => {
                let name = format!("{prefix}{}", field.name);
                let _ = writeln!(text, "[{name}]");
                write_section(section, &format!("{name}."), defaults, text);
            }
            (_, default) => drop(default.map(|default| writeln!(text, "#{} = {default}", field.name))),
        }
    }
}

/// The rows of the tables in `docs/reference/configuration.md`.
pub fn reference_rows() -> Vec<String> {
    let row = |key: Key| {
        let doc = key.doc.replace('|', "\\|").replace('<', "&lt;");
        let Key { name, default, .. } = &key;
        if key.is_limit() {
            return format!("| `{name}` | `{default}` | {doc} |");
        }
        format!("| `{name}` | `{default}` | `{}` | {doc} |", environment_name(name))
    };
    keys().into_iter().map(row).collect()
}
