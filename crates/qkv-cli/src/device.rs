//! The device that computes a model (`--device`), and the precision of its products (`--precision`).

use crate::arguments::{Argument, Kind, Matches};
use crate::failure::Failure;
use qkv_nn::{Device, Machine, Precision};

/// `--device`, for commands that run a model.
pub(crate) const DEVICE: Argument = Argument::new("device", Kind::Word, "Device to run the model on")
    .default("cpu")
    .values(&[("cpu", "all cores, or `--threads` of them"), ("cuda", "the first NVIDIA GPU")]);

/// `--precision`, for commands that translate and transcribe.
pub(crate) const PRECISION: Argument = Argument::new("precision", Kind::Word, "Precision of matrix products on a CPU")
    .default("f32")
    .values(&[("f32", "32 bits"), ("int8", "8 bits, quantized per row: faster, with slightly different scores")]);

/// Whether products are computed in 8 bits.
pub(crate) fn parse_int8(matches: &Matches<'_>) -> bool {
    matches.word("precision") == Some("int8")
}

pub(crate) fn parse(matches: &Matches<'_>) -> Device {
    if matches.word("device") == Some("cuda") { Device::Cuda } else { Device::Cpu }
}

/// The threads of the current pool, in f32, or the GPU, in bf16.
pub(crate) fn machine(device: Device) -> Result<Machine, Failure> {
    let precision = if device == Device::Cuda { Precision::Bf16 } else { Precision::F32 };
    Ok(Machine::on(device, rayon::current_num_threads(), precision).map_err(qkv_models::Error::from)?)
}
