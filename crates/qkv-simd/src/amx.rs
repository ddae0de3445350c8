//! AMX, Intel's tile matrix unit: permission from the operating system, and the tile configuration of a thread.
//!
//! The kernels themselves are in [`bf16_gemm`](crate::bf16_gemm), [`bf16x3_gemm`](crate::bf16x3_gemm) and
//! [`int8`](crate::int8).

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::OnceLock;

/// Whether the CPU has bf16 tiles and the operating system lets this process use them. Linux grants AMX per process, on
/// request: this makes the request.
pub(crate) fn permitted() -> bool {
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    let features = __cpuid_count(7, 0).edx;
    features & AMX_BF16 != 0 && features & AMX_TILE != 0 && granted()
}

/// Whether AMX also multiplies tiles of 8-bit integers. Queried once: in a virtual machine `cpuid` takes microseconds.
pub(crate) fn has_int8() -> bool {
    const AMX_INT8: u32 = 1 << 25;
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| __cpuid_count(7, 0).edx & AMX_INT8 != 0)
}

/// Requests permission to use the tile registers (`ARCH_REQ_XCOMP_PERM`).
#[cfg(target_os = "linux")]
fn granted() -> bool {
    const ARCH_PRCTL: isize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const TILE_DATA: usize = 18;
    let mut answer = ARCH_PRCTL;
    // SAFETY: the system call reads two numbers and changes only the permissions of this process.
    unsafe {
        asm!("syscall", inlateout("rax") answer, in("rdi") ARCH_REQ_XCOMP_PERM, in("rsi") TILE_DATA,
             lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    answer == 0
}

#[cfg(not(target_os = "linux"))]
fn granted() -> bool {
    false
}

/// The configuration of all eight tiles: 16 rows of 64 bytes.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes: [u16; 16],
    rows: [u8; 16],
}

static TILE_CONFIG: TileConfig = TileConfig {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

thread_local! {
    /// The number of [`Tiles`] of this thread.
    static HOLDERS: Cell<usize> = const { Cell::new(0) };
}

/// Keeps the tile registers of this thread configured for as long as the value lives. The last one of a thread releases
/// them.
#[derive(Debug)]
pub(crate) struct Tiles {
    /// The configuration belongs to one thread.
    here: PhantomData<*const ()>,
}

impl Tiles {
    /// Configures the tile registers of this thread.
    ///
    /// # Safety
    /// The CPU has AMX and the operating system has [`permitted`] it.
    pub(crate) unsafe fn new() -> Tiles {
        if HOLDERS.get() == 0 {
            // SAFETY: the caller guarantees the instruction, and the configuration is valid.
            unsafe { asm!("ldtilecfg [{0}]", in(reg) &raw const TILE_CONFIG, options(nostack, readonly)) };
        }
        HOLDERS.set(HOLDERS.get() + 1);
        Tiles { here: PhantomData }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        let left = HOLDERS.get() - 1;
        HOLDERS.set(left);
        if left == 0 {
            // SAFETY: the tiles were configured on this thread, and nothing on it uses them any more.
            unsafe { asm!("tilerelease", options(nostack, nomem)) };
        }
    }
}
