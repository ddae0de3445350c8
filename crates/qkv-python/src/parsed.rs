//! Descriptions parsed from JSON, the form in which operators receive them, and checks of descriptions that come from
//! Python.

use crate::description::{Mask, from_json};
use crate::errors::value;
use pyo3::prelude::*;
use std::sync::Arc;

/// Rejects numbers that JSON cannot represent, and masks that are nested too deeply.
pub fn check(attention: &qkv::Attention) -> PyResult<()> {
    let fixed = match attention.scale {
        qkv::Scale::Fixed(scale) => Some(scale),
        _ => None,
    };
    let dropout = attention.dropout.map(|dropout| dropout.p);
    for (name, number) in
        [("scale", fixed), ("temperature", attention.temperature), ("softcap", attention.softcap), ("dropout", dropout)]
    {
        if let Some(number) = number.filter(|number| !number.is_finite()) {
            return Err(value(format!("`{name}` is {number}, expected a finite number")));
        }
    }
    Mask::checked(attention.mask.clone()).map(|_| ())
}

/// A description from its JSON, cached per string and thread.
pub fn parsed(json: &str) -> PyResult<Arc<qkv::Attention>> {
    use std::cell::RefCell;
    use std::collections::HashMap;
    thread_local! {
        static KNOWN: RefCell<HashMap<String, Arc<qkv::Attention>>> = RefCell::new(HashMap::new());
    }
    /// More descriptions than a program has. The cache of a program that keeps making new ones is cleared at this size.
    const MOST: usize = 256;
    if let Some(known) = KNOWN.with_borrow(|known| known.get(json).cloned()) {
        return Ok(known);
    }
    let attention: qkv::Attention = from_json(json)?;
    check(&attention)?;
    let attention = Arc::new(attention);
    KNOWN.with_borrow_mut(|known| {
        if known.len() >= MOST {
            known.clear();
        }
        known.insert(json.to_string(), attention.clone());
    });
    Ok(attention)
}
