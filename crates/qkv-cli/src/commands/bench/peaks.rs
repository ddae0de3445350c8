//! The peak that stands beside a case: of multiply-adds for what computes; for what decodes, that or reading, whichever
//! holds it back.

use super::case::{Case, Direction};
use crate::number::Precision;
use qkv_simd::{Isa, peak};

/// A peak that is measured again beside every measurement; the best counts.
pub(crate) struct Peak {
    case: Case,
    threads: usize,
    /// As many bytes of these as the case reads; none where it computes.
    numbers: Vec<f32>,
    /// Billions of floating-point operations a second.
    compute: f64,
    /// Billions of bytes a second.
    read: f64,
}

impl Peak {
    pub fn of(case: Case, threads: usize) -> Peak {
        let numbers = match case.direction {
            // Ones, because zeros may all be one page of the system's.
            Direction::Decode => vec![1.0; (case.bytes() / 4.0) as usize],
            _ => Vec::new(),
        };
        Peak { case, threads, numbers, compute: 0.0, read: 0.0 }
    }

    /// Measures it once more: a few milliseconds, and the time of reading all.
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

    /// The share of it that a case reaches which takes this long.
    pub fn share(&self, ms: f64) -> f64 {
        let of = |work: f64, peak: f64| if peak > 0.0 { work / ms / 1e6 / peak } else { 0.0 };
        of(self.case.flops(), self.compute).max(of(self.case.bytes(), self.read))
    }
}
