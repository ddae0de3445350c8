//! The properties of a GPU, as `qkv doctor` prints them and plans use them, and the streams that work is enqueued on.

/// An NVIDIA GPU.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct Device {
    /// The product name.
    pub name: String,
    /// The compute capability: `(9, 0)` for Hopper.
    pub capability: (u32, u32),
    /// The number of multiprocessors.
    pub processors: u32,
    /// The most shared memory a block can use, in bytes.
    pub shared_bytes: usize,
    /// Device memory, in bytes.
    pub memory_bytes: u64,
    /// The newest CUDA version the driver supports: 13.0 is `(13, 0)`.
    pub driver: (u32, u32),
}

impl Device {
    /// The architecture kernels are compiled for.
    pub fn architecture(&self) -> String {
        let (major, minor) = self.capability;
        // `wgmma` and TMA are only in the architecture-specific target.
        if self.is_hopper() { "sm_90a".into() } else { format!("sm_{major}{minor}") }
    }

    /// Whether it has Hopper's warpgroup tensor cores (`wgmma`) and TMA.
    pub fn is_hopper(&self) -> bool {
        self.capability == (9, 0)
    }
}

/// A CUDA stream, by its handle: work on one stream runs in order. 0 is the default stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream(pub u64);
