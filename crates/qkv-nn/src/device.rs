//! The device of a tensor.

/// The memory a tensor is in. There is one kind today; the type is there so that another needs no second tape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Device {
    /// Host memory.
    #[default]
    Cpu,
}
