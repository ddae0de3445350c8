//! Descriptions from JSON, as operators get them, and what a description at the border must not hold.

use crate::description::{Mask, from_json};
use crate::errors::value;
use pyo3::prelude::*;
use std::sync::Arc;

/// Refuses numbers that JSON cannot hold, and masks that are nested too deeply.
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

/// A description from its JSON, parsed once for each string and thread.
pub fn parsed(json: &str) -> PyResult<Arc<qkv::Attention>> {
    use std::cell::RefCell;
    use std::collections::HashMap;
    thread_local! {
        static KNOWN: RefCell<HashMap<String, Arc<qkv::Attention>>> = RefCell::new(HashMap::new());
    }
    /// More descriptions than a program has; one that makes new ones without end starts again.
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
