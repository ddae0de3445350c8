//! The device that computes a model (`--device`), and the precision of its products (`--precision`).

use crate::arguments::{Argument, Kind, Matches};
use crate::failure::Failure;
use qkv_nn::{Device, Machine, Precision};

/// `--device`, for commands that run a model.
pub(crate) const DEVICE: Argument = Argument::new("device", Kind::Word, "Device to run the model on")
    .default("cpu")
    .values(&[("cpu", "all cores, or `--threads` of them"), ("cuda", "the first NVIDIA GPU")]);

/// `--batch-invariant`, for commands that run a trained model.
pub(crate) const BATCH_INVARIANT: Argument = Argument::new(
    "batch-invariant",
    Kind::Switch,
    "On a GPU, compute the same bits for an input alone and in any batch; slower",
);

/// `--precision`, for commands that translate and transcribe.
pub(crate) const PRECISION: Argument = Argument::new("precision", Kind::Word, "Precision of matrix products on a CPU")
    .default("f32")
    .values(&[("f32", "32 bits"), ("int8", "8 bits, quantized per row: faster, with slightly different scores")]);

/// Whether products are computed in 8 bits.
pub(crate) fn parse_int8(matches: &Matches<'_>) -> bool {
    matches.word("precision") == Some("int8")
}

/// `--device`.
pub(crate) fn parse(matches: &Matches<'_>) -> Device {
    if matches.word("device") == Some("cuda") { Device::Cuda } else { Device::Cpu }
}

/// The device of a trained model, and what it promises.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InferenceDevice {
    device: Device,
    batch_invariant: bool,
}

impl InferenceDevice {
    /// `--device` and `--batch-invariant`.
    pub fn parse(matches: &Matches<'_>) -> InferenceDevice {
        InferenceDevice { device: parse(matches), batch_invariant: matches.switch("batch-invariant") }
    }

    /// The threads of the current pool, in f32, or the GPU, in bf16.
    pub fn machine(self) -> Result<Machine, Failure> {
        let precision = if self.device == Device::Cuda { Precision::Bf16 } else { Precision::F32 };
        let machine = Machine::on(self.device, rayon::current_num_threads(), precision);
        Ok(machine.map_err(qkv_models::Error::from)?.batch_invariant(self.batch_invariant))
    }
}
