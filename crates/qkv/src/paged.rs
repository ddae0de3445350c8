//! A paged KV cache: sequences of different lengths share one pool of pages, grow by a page at a time and return their
//! pages. Results are bit-identical to those from a contiguous cache.

use crate::attention::Attention;
use crate::decode::Decode;
use crate::error::{Error, Result};
use crate::inputs::Inputs;
use crate::mask::Mask;
use crate::output::Output;
use crate::source::Pages;
use qkv_simd::{Element, View};

/// Keys and values of many sequences in pages of one size (Kwon et al. 2023, "PagedAttention", arXiv:2309.06180).
///
/// ```
/// use qkv::{Attention, Decode, Mask, PagedCache, Tensor};
/// let mut cache = PagedCache::<f32>::new(2, 16, 16, 64)?; // Hk, D, Dv, tokens a page
/// let (long, short) = (cache.add(), cache.add());
/// for (sequence, tokens) in [(long, 100), (short, 7)] {
///     let [k, v] = [1, 2].map(|seed| Tensor::<f32, 4>::randn([1, 2, tokens, 16], seed)); // [1, Hk, new, D]
///     cache.append(sequence, &k, &v)?;
/// }
/// // One new query for each, at the end of its own sequence.
/// let q = Tensor::<f32, 4>::randn([2, 8, 1, 16], 3);
/// let causal = Attention::scaled_dot().mask(Mask::causal());
/// let out = causal.decode_paged(&q, &cache.batch(&[long, short])?, Decode::Fast)?;
/// assert_eq!(out.values.shape(), [2, 8, 1, 16]);
/// cache.remove(short)?; // its pages can be used again
/// # Ok::<(), qkv::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PagedCache<T> {
    heads: usize,
    widths: [usize; 2],
    size: usize,
    /// Keys and values, `[pages, Hk, size, width]`.
    pools: [Vec<T>; 2],
    pages: usize,
    free: Vec<u32>,
    sequences: Vec<Option<Sequence>>,
}

/// A sequence of a [`PagedCache`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceId(usize);

#[derive(Clone, Debug, Default)]
struct Sequence {
    pages: Vec<u32>,
    length: usize,
}

impl<T: Element> PagedCache<T> {
    /// An empty cache for `heads` key heads, keys of `d` and values of `dv`, with `size` tokens per page.
    pub fn new(heads: usize, d: usize, dv: usize, size: usize) -> Result<Self> {
        if size == 0 {
            return Err(Error::value("page size", 0, "at least 1 token"));
        }
        let pools = [Vec::new(), Vec::new()];
        Ok(PagedCache { heads, widths: [d, dv], size, pools, pages: 0, free: Vec::new(), sequences: Vec::new() })
    }

    /// A new sequence, without tokens.
    pub fn add(&mut self) -> SequenceId {
        self.sequences.push(Some(Sequence::default()));
        SequenceId(self.sequences.len() - 1)
    }

    /// Removes a sequence; its pages become free.
    pub fn remove(&mut self, sequence: SequenceId) -> Result<()> {
        let Sequence { pages, .. } = self.get(sequence)?.clone();
        self.free.extend(pages);
        self.sequences[sequence.0] = None;
        Ok(())
    }

    /// The number of tokens of a sequence.
    pub fn len(&self, sequence: SequenceId) -> Result<usize> {
        Ok(self.get(sequence)?.length)
    }

    /// The number of pages in use, and of all pages.
    pub fn pages(&self) -> (usize, usize) {
        (self.pages - self.free.len(), self.pages)
    }

    fn get(&self, sequence: SequenceId) -> Result<&Sequence> {
        let found = self.sequences.get(sequence.0).and_then(Option::as_ref);
        found.ok_or_else(|| Error::value("sequence", sequence.0, "one that was added and not removed"))
    }

    /// Adds the keys `[1, Hk, new, D]` and values `[1, Hk, new, Dv]` of new tokens to a sequence.
    pub fn append<'a>(
        &mut self,
        sequence: SequenceId,
        k: impl Into<View<'a, T>>,
        v: impl Into<View<'a, T>>,
    ) -> Result<()> {
        let given = [k.into(), v.into()];
        let (start, new) = (self.len(sequence)?, given[0].shape()[2]);
        for (x, name) in ["k", "v"].into_iter().enumerate() {
            let expected = [1, self.heads, new, self.widths[x]];
            if given[x].shape() != expected {
                return Err(Error::shape(name, &given[x].shape(), format!("{expected:?}, to be appended")));
            }
        }
        let mut pages = self.get(sequence)?.pages.clone();
        while pages.len() * self.size < start + new {
            let page = self.take_page()?;
            pages.push(page);
        }
        for (x, view) in given.into_iter().enumerate() {
            let width = self.widths[x];
            for i in 0..new {
                let (page, row) = (pages[(start + i) / self.size] as usize, (start + i) % self.size);
                for h in 0..self.heads {
                    let at = ((page * self.heads + h) * self.size + row) * width;
                    for (c, to) in self.pools[x][at..at + width].iter_mut().enumerate() {
                        *to = view.at(0, h, i, c);
                    }
                }
            }
        }
        self.sequences[sequence.0] = Some(Sequence { pages, length: start + new });
        Ok(())
    }

    /// A free page; the pool doubles if there is none.
    fn take_page(&mut self) -> Result<u32> {
        if let Some(page) = self.free.pop() {
            return Ok(page);
        }
        let pages = (self.pages * 2).max(8);
        let too_large = || Error::TooLarge { tensor: "pages", shape: vec![pages, self.heads, self.size] };
        u32::try_from(pages).map_err(|_| too_large())?;
        for (pool, width) in self.pools.iter_mut().zip(self.widths) {
            let len = crate::tensor::checked_len::<T>("pages", &[pages, self.heads, self.size, width])?;
            pool.try_reserve(len - pool.len()).map_err(|_| too_large())?;
            pool.resize(len, T::default());
        }
        self.free.extend((self.pages as u32..pages as u32).rev());
        self.pages = pages;
        self.take_page()
    }

    /// A batch of sequences, for one call.
    pub fn batch(&self, sequences: &[SequenceId]) -> Result<PagedBatch<'_, T>> {
        let all: Vec<&Sequence> = sequences.iter().map(|&sequence| self.get(sequence)).collect::<Result<_>>()?;
        let most = all.iter().map(|sequence| sequence.pages.len()).max().unwrap_or(0);
        // Beyond the end of a shorter sequence any page will do: its length masks it.
        let row = |sequence: &&Sequence| {
            let missing = std::iter::repeat_n(0, most - sequence.pages.len());
            sequence.pages.iter().copied().chain(missing).collect::<Vec<u32>>()
        };
        Ok(PagedBatch {
            cache: self,
            table: all.iter().flat_map(row).collect(),
            lengths: all.iter().map(|sequence| sequence.length).collect(),
        })
    }
}

/// A batch of sequences of a [`PagedCache`], as inputs of one call.
#[derive(Debug)]
pub struct PagedBatch<'a, T> {
    cache: &'a PagedCache<T>,
    table: Vec<u32>,
    lengths: Vec<usize>,
}

impl<T: Element> PagedBatch<'_, T> {
    /// The keys, `[B, Hk, longest, D]`.
    pub fn keys(&self) -> Pages<'_, T> {
        self.source(0)
    }

    /// The values, `[B, Hk, longest, Dv]`.
    pub fn values(&self) -> Pages<'_, T> {
        self.source(1)
    }

    fn source(&self, x: usize) -> Pages<'_, T> {
        let PagedCache { pages, heads, size, widths, pools, .. } = self.cache;
        let pool = View::new(&pools[x], [*pages, *heads, *size, widths[x]]).expect("the pool has its pages");
        let longest = self.lengths.iter().copied().max().unwrap_or(0);
        Pages::new(pool, &self.table, self.lengths.len(), longest).expect("the table is the cache's own")
    }

    /// The number of tokens of each sequence, `[B]`.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// The places of `n` queries at the end of each sequence, `[B, n]`.
    pub fn positions(&self, n: usize) -> Vec<i64> {
        self.lengths.iter().flat_map(|&length| (0..n).map(move |i| length as i64 - n as i64 + i as i64)).collect()
    }
}

impl Attention {
    /// [`decode`](Attention::decode) against sequences of different lengths in a [`PagedCache`]: the
    /// queries of each sequence (one, or a chunk of a prompt) stand at its end.
    pub fn decode_paged<'a, T: crate::Element>(
        &self,
        q: impl Into<View<'a, T>>,
        batch: &PagedBatch<'_, T>,
        how: Decode,
    ) -> Result<Output<T>> {
        let q = q.into();
        let positions = batch.positions(q.shape()[2]);
        let inputs = Inputs::new(q, batch.keys(), batch.values()).lengths(batch.lengths()).positions(&positions);
        self.clone().mask(Mask::lengths()).decode(inputs, how)
    }
}
