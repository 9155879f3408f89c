//! Layers of values, each with precedence over those before. Every value is validated when it is added, so that an
//! error names its key and place.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use toml::de::{DeTable, DeValue};

use super::document::{FILE_VARIABLE, Key, PREFIX, defaults, environment_name, keys};
use super::former::{Instead, former};
use super::{Config, ConfigError, Origin, Problem};

/// Minimum similarity of a key to be suggested: 1 is equal.
const ALIKE: f64 = 0.6;

pub(super) struct Layers {
    keys: Vec<Key>,
    /// Keys of earlier versions, with what replaces them.
    former: Vec<(String, Instead)>,
    /// All values so far; they always form a valid configuration.
    table: toml::Table,
    config: Config,
    origins: BTreeMap<String, Origin>,
    problems: Vec<Problem>,
}

impl Layers {
    pub(super) fn new() -> Result<Layers, ConfigError> {
        let (origins, problems, keys) = (BTreeMap::new(), Vec::new(), keys());
        let former = former(&keys);
        Ok(Layers { keys, former, table: defaults(), config: Config::default(), origins, problems })
    }

    pub(super) fn add_file(&mut self, path: &Path, text: &str) {
        let origin = |offset: Option<usize>| Origin::File {
            path: path.to_owned(),
            line: offset.and_then(|offset| text.get(..offset)).map(|before| before.matches('\n').count() + 1),
        };
        let (spans, values) = match (DeTable::parse(text), text.parse::<toml::Table>()) {
            (Ok(spans), Ok(values)) => (spans, values),
            (Err(error), _) | (_, Err(error)) => {
                let what = format!("this is not TOML: {}", error.message());
                let offset = error.span().map(|span| span.start);
                self.problems.push(Problem { origin: origin(offset), key: None, what });
                return;
            }
        };
        let mut places = Vec::new();
        collect_places(spans.get_ref(), "", &|name| self.has_keys(name), &mut places);
        for (name, offset) in places {
            if let Some(value) = value_at(&values, &name) {
                self.set(&name, value.clone(), origin(Some(offset)));
            }
        }
    }

    /// The variables with the agent's prefix. Others are ignored, and so is an empty value unless the key may be empty:
    /// templates of containers and units set variables without a value.
    pub(super) fn add_environment(&mut self, variables: &BTreeMap<String, String>) {
        for (variable, text) in variables.range(PREFIX.to_owned()..) {
            if !variable.starts_with(PREFIX) {
                return;
            }
            if variable == FILE_VARIABLE {
                continue;
            }
            let origin = Origin::Environment(variable.clone());
            match self.keys.iter().find(|key| environment_name(&key.name) == *variable) {
                Some(key) => {
                    let (name, value) = (key.name.clone(), value_of(text, &key.default));
                    let problems = self.problems.len();
                    self.set(&name, value, origin);
                    if text.trim().is_empty() {
                        self.problems.truncate(problems);
                    }
                }
                None => {
                    let names = self.keys.iter().map(|key| environment_name(&key.name));
                    let former = self.former.iter().find(|(name, _)| environment_name(name) == *variable);
                    let what = match former {
                        Some((_, Instead::Key(now))) => format!("it is {} now", environment_name(now)),
                        Some((_, Instead::Fixed(value))) => fixed(value),
                        None => format!("there is no such setting{}", suggestion(variable, names)),
                    };
                    self.problems.push(Problem { origin, key: None, what });
                }
            }
        }
    }

    pub(super) fn add_overrides(&mut self, overrides: &[(String, String)]) {
        for (name, text) in overrides {
            let default = self.keys.iter().find(|key| key.name == *name).map(|key| key.default.clone());
            let value =
                default.map_or_else(|| toml::Value::String(text.clone()), |default| value_of(text, &default));
            self.set(name, value, Origin::CommandLine);
        }
    }

    /// The configuration, if no problem was found, including problems of several values together.
    pub(super) fn finish(
        mut self,
        check: impl Fn(&Config) -> Vec<(&'static str, String)>,
    ) -> Result<Config, ConfigError> {
        for (key, what) in check(&self.config) {
            let origin = self.origins.get(key).cloned().unwrap_or(Origin::Together);
            self.problems.push(Problem { origin, key: Some(key.to_owned()), what });
        }
        if self.problems.is_empty() { Ok(self.config) } else { Err(ConfigError { problems: self.problems }) }
    }

    fn is_section(&self, name: &str) -> bool {
        self.keys.iter().any(|key| is_below(&key.name, name))
    }

    /// Whether it is or was a section.
    fn has_keys(&self, name: &str) -> bool {
        self.is_section(name) || self.former.iter().any(|(key, _)| is_below(key, name))
    }

    /// The names of all keys and sections.
    fn names(&self) -> BTreeSet<String> {
        let with_sections = |key: &Key| {
            let dots: Vec<usize> = key.name.match_indices('.').map(|(dot, _)| dot).collect();
            dots.into_iter().chain([key.name.len()]).map(|end| key.name[..end].to_owned()).collect::<Vec<_>>()
        };
        self.keys.iter().flat_map(with_sections).collect()
    }

    fn set(&mut self, name: &str, value: toml::Value, origin: Origin) {
        let problem = |what| Problem { origin: origin.clone(), key: Some(name.to_owned()), what };
        let Some(key) = self.keys.iter().find(|key| key.name == name) else {
            let what = match self.former.iter().find(|(key, _)| key == name) {
                _ if self.is_section(name) => {
                    format!("this is a section: write [{name}] with its keys below")
                }
                Some((_, Instead::Key(now))) => format!("it is {now} now"),
                Some((_, Instead::Fixed(value))) => fixed(value),
                None => format!("there is no such key{}", suggestion(name, self.names().into_iter())),
            };
            self.problems.push(problem(what));
            return;
        };
        let mut table = self.table.clone();
        put(&mut table, name, value);
        match table.clone().try_into::<Config>() {
            Ok(config) => {
                (self.table, self.config) = (table, config);
                self.origins.insert(name.to_owned(), origin);
            }
            Err(error) => {
                let what = format!("{} (the default is {})", error.message(), key.default);
                self.problems.push(problem(what));
            }
        }
    }
}

fn is_below(key: &str, section: &str) -> bool {
    key.strip_prefix(section).is_some_and(|rest| rest.starts_with('.'))
}

fn fixed(value: &str) -> String {
    format!("it cannot be configured any more; the value is {value}")
}

/// The dotted names of all values with the positions of their keys. A name that is not a section is a leaf,
/// whatever its value.
fn collect_places(
    table: &DeTable<'_>,
    prefix: &str,
    is_section: &impl Fn(&str) -> bool,
    places: &mut Vec<(String, usize)>,
) {
    for (key, value) in table {
        let name = format!("{prefix}{}", key.get_ref());
        match value.get_ref() {
            DeValue::Table(section) if is_section(&name) => {
                collect_places(section, &format!("{name}."), is_section, places);
            }
            _ => places.push((name, key.span().start)),
        }
    }
    // In file order, the order in which a person goes through the problems.
    places.sort_by_key(|(_, place)| *place);
}

fn value_at<'a>(table: &'a toml::Table, name: &str) -> Option<&'a toml::Value> {
    match name.split_once('.') {
        // A quoted key may contain a dot.
        Some((section, rest)) if !table.contains_key(name) => value_at(table.get(section)?.as_table()?, rest),
        _ => table.get(name),
    }
}

fn put(table: &mut toml::Table, name: &str, value: toml::Value) {
    match name.split_once('.') {
        Some((section, rest)) => {
            if let Some(toml::Value::Table(table)) = table.get_mut(section) {
                put(table, rest, value);
            }
        }
        None => drop(table.insert(name.to_owned(), value)),
    }
}

/// The value of a text from the environment or the command line, by the type of the key's default. Text that does
/// not fit stays text, and is refused as such.
fn value_of(text: &str, default: &toml::Value) -> toml::Value {
    let as_text = || toml::Value::String(text.to_owned());
    let trimmed = text.trim();
    match default {
        toml::Value::Integer(_) => trimmed.parse().map_or_else(|_| as_text(), toml::Value::Integer),
        toml::Value::Float(_) => trimmed.parse().map_or_else(|_| as_text(), toml::Value::Float),
        toml::Value::Boolean(_) => trimmed.parse().map_or_else(|_| as_text(), toml::Value::Boolean),
        toml::Value::Array(_) => {
            let item = |item: &str| match item.parse() {
                Ok(number) => toml::Value::Integer(number),
                Err(_) => toml::Value::String(item.to_owned()),
            };
            let items = trimmed.split(',').map(str::trim).filter(|item| !item.is_empty());
            toml::Value::Array(items.map(item).collect())
        }
        toml::Value::String(_) | toml::Value::Datetime(_) | toml::Value::Table(_) => as_text(),
    }
}

/// The most similar name, if one is similar enough: as a whole, or by its last part in another section.
fn suggestion(name: &str, candidates: impl Iterator<Item = String>) -> String {
    let last = |name: &str| name.rsplit('.').next().unwrap_or_default().to_owned();
    let alike = |candidate: &str| {
        let whole = strsim::normalized_damerau_levenshtein(name, candidate);
        // A right key in a wrong section is similar, but less so than a typo.
        let part = strsim::normalized_damerau_levenshtein(&last(name), &last(candidate)) * 0.9;
        whole.max(part)
    };
    let nearest = candidates
        .map(|candidate| (alike(&candidate), candidate))
        .max_by(|(left, _), (right, _)| left.total_cmp(right))
        .filter(|(alike, _)| *alike >= ALIKE);
    match nearest {
        Some((_, candidate)) => format!("; did you mean {candidate}?"),
        None => "; `mainstay config --default` prints them all".to_owned(),
    }
}
