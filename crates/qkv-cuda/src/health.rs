//! What a machine has for this crate, as `qkv doctor` tells it: cards, driver, compiler, and the cache of kernels.

use crate::cache::Cache;
use crate::card::OnCard;
use crate::driver::{Card, Driver};
use crate::nvrtc::Compiler;
use serde::Serialize;

/// What there is, and what is missing.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Health {
    /// The cards, or why there are none.
    pub cards: Result<Vec<Card>, String>,
    /// NVRTC's version and where it was found, or what is missing.
    pub compiler: Result<String, String>,
    /// Where compiled kernels are kept.
    pub cache: String,
    /// How many there are, and how many bytes they take.
    pub kernels: (usize, u64),
    /// Why the cache cannot be written, if it cannot.
    pub cache_problem: Option<String>,
}

impl Health {
    /// Of this machine.
    ///
    /// ```
    /// let health = qkv_cuda::Health::of_this_machine();
    /// assert!(!health.cache.is_empty());
    /// ```
    pub fn of_this_machine() -> Health {
        let cache = Cache::of_the_user();
        let cards = OnCard::count().and_then(|count| {
            (0..count).map(|number| Ok(OnCard::new(number, cache.clone())?.card().clone())).collect()
        });
        let compiler = Compiler::find().map(|found| {
            let (major, minor) = found.version();
            format!("{major}.{minor}, {}", found.path())
        });
        let told = |error: crate::Error| match error.hint() {
            Some(hint) => format!("{error}; {hint}"),
            None => error.to_string(),
        };
        Health {
            // A machine without a driver has nowhere to write kernels for: its cache is left alone.
            cache_problem: cards.is_ok().then(|| cache.writable().err()).flatten().map(|error| error.to_string()),
            cards: cards.map_err(told),
            compiler: compiler.map_err(told),
            cache: cache.folder().display().to_string(),
            kernels: cache.size(),
        }
    }
}
