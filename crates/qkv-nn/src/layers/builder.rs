//! Where layers put their parameters: a place in the names, and the seed they are drawn from.

use crate::float::Float;
use crate::parameters::{Init, Param, Parameters};

/// Adds parameters under a prefix.
#[derive(Debug)]
pub struct Builder<'a, T> {
    parameters: &'a mut Parameters<T>,
    prefix: String,
    /// `None` where the numbers come from elsewhere.
    seed: Option<u64>,
}

impl<'a, T: Float> Builder<'a, T> {
    /// At the top.
    pub fn new(parameters: &'a mut Parameters<T>, seed: u64) -> Self {
        Builder { parameters, prefix: String::new(), seed: Some(seed) }
    }

    /// At the top, for numbers that are read from a file: nothing is drawn, all begin as zeros.
    pub fn blank(parameters: &'a mut Parameters<T>) -> Self {
        Builder { parameters, prefix: String::new(), seed: None }
    }

    /// Below: `at("encoder")` adds `encoder.…`.
    pub fn at(&mut self, name: &str) -> Builder<'_, T> {
        let prefix = format!("{}{name}.", self.prefix);
        Builder { parameters: self.parameters, prefix, seed: self.seed }
    }

    /// Adds a parameter here.
    pub fn add(&mut self, name: &str, shape: &[usize], init: Init) -> Param {
        let init = if self.seed.is_some() { init } else { Init::Zeros };
        self.parameters.add(&format!("{}{name}", self.prefix), shape, init, self.seed.unwrap_or(0))
    }
}
