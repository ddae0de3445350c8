//! The peak of the machine for a case: multiply-adds, or for decoding memory bandwidth, whichever is the bottleneck.

use super::case::{Case, Direction};
use crate::dtype::Precision;
use qkv_simd::{Isa, peak};

/// The peak, measured anew beside every measurement; the best one counts.
pub(crate) struct Peak {
    case: Case,
    threads: usize,
    /// As many bytes as decoding reads; empty in the other directions.
    numbers: Vec<f32>,
    /// GFLOP/s.
    compute: f64,
    /// GB/s.
    read: f64,
}

impl Peak {
    pub fn of(case: Case, threads: usize) -> Peak {
        let numbers = match case.direction {
            // Ones: the system may map all pages of zeros to a single one.
            Direction::Decode => vec![1.0; (case.bytes() / 4.0) as usize],
            _ => Vec::new(),
        };
        Peak { case, threads, numbers, compute: 0.0, read: 0.0 }
    }

    /// Measures once more: a few milliseconds, plus reading the buffer.
    pub fn measure(&mut self) {
        let (isa, threads) = (Isa::best(), self.threads);
        let compute = match self.case.precision {
            Precision::F64 => peak::fma::<f64>(isa, threads),
            Precision::Bf16 => peak::tiles(isa, threads).unwrap_or_else(|| peak::fma::<f32>(isa, threads)),
            Precision::F32 | Precision::F16 => peak::fma::<f32>(isa, threads),
        };
        self.compute = self.compute.max(compute);
        if !self.numbers.is_empty() {
            self.read = self.read.max(peak::read(isa, &self.numbers, threads));
        }
    }

    /// The fraction of the peak that a time of `ms` reaches.
    pub fn share(&self, ms: f64) -> f64 {
        let of = |work: f64, peak: f64| if peak > 0.0 { work / ms / 1e6 / peak } else { 0.0 };
        of(self.case.flops(), self.compute).max(of(self.case.bytes(), self.read))
    }
}
