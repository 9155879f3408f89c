//! Values in configuration files, and structs of settings with their own documentation.
//!
//! Each value has one written form with its unit: "5s", "64MiB", a percentage from 0 to 100. Errors name the expected form.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

use crate::time::Span;

/// One key of a configuration.
#[derive(Debug)]
pub struct Field {
    /// Its name in its section.
    pub name: &'static str,
    /// Its documentation, line by line.
    pub doc: &'static [&'static str],
    /// The keys below it, if it is a section.
    pub section: Option<&'static [Field]>,
}

/// Declares a struct of settings: first its values with their defaults, then its sections. The doc comments become `FIELDS`, which the
/// commented default file and the tests of the reference use.
#[macro_export]
macro_rules! settings {
    (
        $(#[doc = $struct_doc:literal])+
        pub struct $name:ident {
            $( $(#[doc = $doc:literal])+ $(#[serde($($serde:tt)*)])? $field:ident : $type:ty = $default:expr ),* $(,)?
        }
        sections {
            $( $(#[doc = $section_doc:literal])+ $section:ident : $section_type:ty ),* $(,)?
        }
    ) => {
        $(#[doc = $struct_doc])+
        #[derive(Clone, Debug, PartialEq, ::serde::Serialize, ::serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $( $(#[doc = $doc])+ $(#[serde($($serde)*)])? pub $field: $type, )*
            $( $(#[doc = $section_doc])+ pub $section: $section_type, )*
        }

        impl Default for $name {
            fn default() -> $name {
                $name { $( $field: $default, )* $( $section: <$section_type>::default(), )* }
            }
        }

        impl $name {
            /// The keys of this section with their documentation.
            pub const FIELDS: &'static [$crate::units::Field] = &[
                $( $crate::units::Field {
                    name: stringify!($field), doc: &[$($doc),+], section: None,
                }, )*
                $( $crate::units::Field {
                    name: stringify!($section), doc: &[$($section_doc),+],
                    section: Some(<$section_type>::FIELDS),
                }, )*
            ];
        }
    };
}

/// A duration, written as a whole number with its unit: `500ms`, `5s`, `10m`, `2h`, `7d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Period(pub Span);

/// A number of bytes, written as a whole number with its unit: `4096B`, `64KiB`, `512MiB`, `4GiB`, `1TiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

/// A percentage from 0 to 100.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Percent(pub f64);

const PERIOD_UNITS: [(&str, u64); 5] = [
    ("d", 86_400_000_000_000),
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
];

const BYTE_UNITS: [(&str, u64); 5] =
    [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// Parses a whole number with one of the units.
fn parse_with_unit(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let text = text.trim();
    let (number, unit) = text.split_at(text.find(|letter: char| !letter.is_ascii_digit())?);
    let factor = units.iter().find(|(name, _)| *name == unit.trim_start())?.1;
    number.parse::<u64>().ok()?.checked_mul(factor)
}

/// Formats a number in the largest unit that keeps it whole.
fn format_with_unit(number: u64, units: &[(&str, u64)]) -> Option<String> {
    let (name, factor) = units.iter().find(|(_, factor)| number.is_multiple_of(*factor))?;
    Some(format!("{}{name}", number / factor))
}

impl Period {
    /// A period of whole seconds.
    pub const fn seconds(seconds: u64) -> Period {
        Period(Span::seconds(seconds))
    }

    /// Parses the written form.
    pub fn parse(text: &str) -> Result<Period, String> {
        parse_with_unit(text, &PERIOD_UNITS)
            .filter(|nanoseconds| *nanoseconds > 0)
            .map(|nanoseconds| Period(Span(nanoseconds)))
            .ok_or_else(|| {
                format!(
                    "{text:?} is not a length of time: write a whole number above 0 with ms, s, m, h or d, like \"5s\""
                )
            })
    }
}

impl std::fmt::Display for Period {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let whole_ms = self.0.0 - self.0.0 % 1_000_000;
        match format_with_unit(whole_ms, &PERIOD_UNITS) {
            Some(text) if whole_ms > 0 => f.write_str(&text),
            _ => f.write_str("0ms"),
        }
    }
}

impl Bytes {
    /// Parses the written form.
    pub fn parse(text: &str) -> Result<Bytes, String> {
        parse_with_unit(text, &BYTE_UNITS).map(Bytes).ok_or_else(|| {
            format!(
                "{text:?} is not a size: write a whole number with B, KiB, MiB, GiB or TiB, like \"64MiB\""
            )
        })
    }

    /// The size for display, rounded: "1.5 GiB".
    pub fn rounded(self) -> String {
        match BYTE_UNITS.iter().find(|(_, factor)| self.0 >= *factor) {
            Some((name, 1)) => format!("{} {name}", self.0),
            Some((name, factor)) => format!("{:.1} {name}", self.0 as f64 / *factor as f64),
            None => "0 B".to_owned(),
        }
    }
}

impl std::fmt::Display for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match format_with_unit(self.0, &BYTE_UNITS) {
            Some(text) if self.0 > 0 => f.write_str(&text),
            _ => f.write_str("0B"),
        }
    }
}

macro_rules! written_as_text {
    ($type:ident) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<$type, D::Error> {
                let text = String::deserialize(deserializer)?;
                $type::parse(&text).map_err(D::Error::custom)
            }
        }
    };
}

written_as_text!(Period);
written_as_text!(Bytes);

impl Serialize for Percent {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.0)
    }
}

impl<'de> Deserialize<'de> for Percent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Percent, D::Error> {
        let number = f64::deserialize(deserializer)?;
        match number {
            0.0..=100.0 => Ok(Percent(number)),
            _ => Err(D::Error::custom(format!("{number} is not a percentage: write a number from 0 to 100"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn units_are_required_and_named_in_errors() {
        assert_eq!(Period::parse("5s"), Ok(Period::seconds(5)));
        assert_eq!(Period::parse(" 2 h "), Ok(Period::seconds(7200)));
        assert_eq!(Bytes::parse("64MiB"), Ok(Bytes(64 << 20)));
        for wrong in ["", "5", "s", "-1s", "1.5s", "5 sec", "0s", "99999999999999999999s", "999999999999d"] {
            assert!(Period::parse(wrong).is_err_and(|error| error.contains("like \"5s\"")), "{wrong}");
        }
        for wrong in ["", "5", "64MB", "64 mib", "20000000TiB"] {
            assert!(Bytes::parse(wrong).is_err_and(|error| error.contains("like \"64MiB\"")), "{wrong}");
        }
    }

    #[test]
    fn sizes_are_rounded_for_display() {
        let check = |bytes, text| assert_eq!(Bytes(bytes).rounded(), text);
        check(0, "0 B");
        check(1023, "1023 B");
        check(1536 << 20, "1.5 GiB");
    }

    proptest! {
        #[test]
        fn formatted_values_are_parsed_back(number in 1..u64::MAX / 1_000_000) {
            prop_assert_eq!(Bytes::parse(&Bytes(number).to_string()), Ok(Bytes(number)));
            let period = Period(Span(number * 1_000_000));
            prop_assert_eq!(Period::parse(&period.to_string()), Ok(period));
        }

        #[test]
        fn no_text_makes_parsing_panic(text in any::<String>()) {
            let _ = (Period::parse(&text), Bytes::parse(&text));
        }
    }
}
