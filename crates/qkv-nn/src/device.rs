//! Where a tensor's numbers lie.

/// A place for numbers. Tensors carry it from the first day, so that another device joins without a second tape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Device {
    /// This machine's memory.
    #[default]
    Cpu,
}
