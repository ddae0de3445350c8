//! **Heads**: who shares keys and values? The shapes decide: as many key heads as query heads is multi-head attention
//! (Vaswani et al. 2017, arXiv:1706.03762), one for several is grouped-query (Ainslie et al. 2023, arXiv:2305.13245),
//! one for all is multi-query (Shazeer 2019, arXiv:1911.02150).

use crate::error::{Error, Result};

/// How query heads are divided among key heads: query head `h` uses key head `h / group`.
///
/// ```
/// use qkv::{Attention, Inputs, Tensor};
/// let q = Tensor::<f32, 4>::randn([1, 8, 5, 16], 1);
/// let k = Tensor::<f32, 4>::randn([1, 2, 7, 16], 2); // two key heads for eight query heads
/// let out = Attention::scaled_dot().forward(Inputs::new(&q, &k, &k))?;
/// assert_eq!(out.values.shape(), [1, 8, 5, 16]);
/// # Ok::<(), qkv::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Heads of the queries.
    pub query: usize,
    /// Heads of the keys and values.
    pub key: usize,
    /// Query heads for each key head.
    pub group: usize,
}

impl Heads {
    /// From the heads of `q` and of `k`; an error if the first is not a multiple of the second.
    pub fn new(query: usize, key: usize) -> Result<Heads> {
        match (query, key) {
            (0, 0) => Ok(Heads { query, key, group: 1 }),
            (query, key) if key > 0 && query % key == 0 => Ok(Heads { query, key, group: query / key }),
            _ => Err(Error::Heads { query, key }),
        }
    }
}
