//! Typed access to the fields of a foreign `config.json`, with errors that name the file and the field.

use crate::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// A `config.json`.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    pub json: &'a Value,
    pub path: &'a Path,
}

impl Fields<'_> {
    /// An error about a field.
    pub fn wrong(&self, name: &str, what: impl Into<String>) -> Error {
        Error::format(self.path, format!("field `{name}`"), what)
    }

    /// The first of these fields that is present and not null.
    fn find(&self, names: &[&str]) -> Option<&Value> {
        names.iter().filter_map(|name| self.json.get(name)).find(|value| !value.is_null())
    }

    /// An optional whole number.
    pub fn whole(&self, names: &[&str]) -> Result<Option<usize>> {
        let Some(value) = self.find(names) else { return Ok(None) };
        let number = value.as_u64().and_then(|x| usize::try_from(x).ok());
        number.map(Some).ok_or_else(|| self.wrong(names[0], format!("it is {value}, expected a whole number")))
    }

    /// A required whole number.
    pub fn needed(&self, names: &[&str]) -> Result<usize> {
        self.whole(names)?.ok_or_else(|| self.wrong(names[0], "it is missing"))
    }

    /// A number with a default.
    pub fn number(&self, name: &str, other: f64) -> Result<f64> {
        let Some(value) = self.find(&[name]) else { return Ok(other) };
        value.as_f64().ok_or_else(|| self.wrong(name, format!("it is {value}, expected a number")))
    }

    /// A boolean with a default.
    pub fn flag(&self, name: &str, other: bool) -> Result<bool> {
        let Some(value) = self.find(&[name]) else { return Ok(other) };
        value.as_bool().ok_or_else(|| self.wrong(name, format!("it is {value}, expected `true` or `false`")))
    }

    /// A string with a default.
    pub fn word(&self, name: &str, other: &'static str) -> Result<&str> {
        let Some(value) = self.find(&[name]) else { return Ok(other) };
        value.as_str().ok_or_else(|| self.wrong(name, format!("it is {value}, expected a word")))
    }

    /// A token id; the first, if there are several.
    pub fn token(&self, name: &str) -> Result<Option<u32>> {
        let Some(mut value) = self.find(&[name]) else { return Ok(None) };
        if let Some(first) = value.as_array().and_then(|list| list.first()) {
            value = first;
        }
        let number = value.as_u64().and_then(|x| u32::try_from(x).ok());
        number.map(Some).ok_or_else(|| self.wrong(name, format!("it is {value}, expected the number of a token")))
    }

    /// Refuses a field with any other value.
    pub fn only(&self, name: &str, expected: Value) -> Result<()> {
        match self.find(&[name]) {
            Some(found) if *found != expected => {
                Err(self.wrong(name, format!("it is {found}, and only {expected} is supported")))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_null_field_does_not_hide_its_other_names() {
        let json = json!({ "n_inner": null, "ffn_dim": 64 });
        let fields = Fields { json: &json, path: Path::new("config.json") };
        assert_eq!(fields.whole(&["n_inner", "ffn_dim"]).unwrap(), Some(64));
        assert_eq!(fields.whole(&["n_inner"]).unwrap(), None);
    }
}
