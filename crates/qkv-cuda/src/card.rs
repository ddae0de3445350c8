//! A card behind NVIDIA's driver, loaded at run time. Every call makes the card's context current on its thread, and every
//! refusal carries the driver's words.

use crate::cache::{Cache, Key};
use crate::driver::{Card, Driver, Kernel, Module, Stream, TensorMap};
use crate::error::{Error, Result};
use crate::nvrtc::Compiler;
use crate::program::Program;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUfunction_attribute, CUstream};
use std::any::Any;
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex, PoisonError};

/// A card of this machine.
#[derive(Debug)]
pub(crate) struct OnCard {
    card: Card,
    context: usize,
    cache: Cache,
    modules: Mutex<HashMap<String, Arc<dyn Module>>>,
}

#[derive(Debug)]
struct Loaded(usize);

impl Module for Loaded {
    fn any(&self) -> &dyn Any {
        self
    }
}

fn doing<'a>(doing: impl Fn() -> String + 'a) -> impl Fn(DriverError) -> Error + 'a {
    move |error| {
        let name = error.error_name().map(|name| name.to_string_lossy().into_owned());
        let words = error.error_string().map(|words| words.to_string_lossy().into_owned());
        let words = match (name, words) {
            (Ok(name), Ok(words)) => format!("{name}: {words}"),
            _ => format!("{error:?}"),
        };
        Error::Driver { doing: doing(), words }
    }
}

impl OnCard {
    /// How many cards there are.
    pub fn count() -> Result<usize> {
        // SAFETY: looking for a library by its name has no precondition.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::NoDriver { library: if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" } });
        }
        match result::init() {
            Err(DriverError(sys::cudaError_enum::CUDA_ERROR_NO_DEVICE)) => return Ok(0),
            initialised => initialised.map_err(doing(|| "starting the driver".into()))?,
        }
        let count = result::device::get_count().map_err(doing(|| "counting cards".into()))?;
        Ok(count.max(0) as usize)
    }

    /// The card of this number, from 0.
    pub fn new(number: usize, cache: Cache) -> Result<OnCard> {
        let found = OnCard::count()?;
        if number >= found {
            return Err(Error::NoCard { asked: number, found });
        }
        let failed = doing(move || format!("opening GPU {number}"));
        let device = result::device::get(number as i32).map_err(&failed)?;
        // SAFETY: the device is the driver's own.
        let attribute = |which: Attribute| unsafe { result::device::get_attribute(device, which) };
        let number_of = |which| attribute(which).map(|found| found.max(0) as u32).map_err(&failed);
        let capability = (
            number_of(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            number_of(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let name = result::device::get_name(device).map_err(&failed)?;
        if capability < (8, 0) {
            return Err(Error::TooOld { name, capability });
        }
        let mut version = 0;
        // SAFETY: it writes one number.
        unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(&failed)?;
        // SAFETY: the device is the driver's own.
        let memory_bytes = unsafe { result::device::total_mem(device) }.map_err(&failed)? as u64;
        // SAFETY: likewise; it is released when this is dropped.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(&failed)? as usize;
        let card = Card {
            name,
            capability,
            processors: number_of(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes: number_of(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
            memory_bytes,
            driver: (version as u32 / 1000, version as u32 % 1000 / 10),
        };
        Ok(OnCard { card, context, cache, modules: Mutex::default() })
    }

    fn current(&self) -> Result<()> {
        // SAFETY: the context is retained for as long as this lives.
        unsafe { result::ctx::set_current(self.context as sys::CUcontext) }
            .map_err(doing(|| "making the card's context current".into()))
    }
}

fn stream_of(stream: Stream) -> CUstream {
    stream.0 as CUstream
}

fn handle_of(module: &Arc<dyn Module>) -> Result<usize> {
    let loaded = module.any().downcast_ref::<Loaded>();
    loaded.map(|loaded| loaded.0).ok_or_else(|| Error::memory("module", "was loaded by another driver"))
}

impl Driver for OnCard {
    fn card(&self) -> &Card {
        &self.card
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.current()?;
        // SAFETY: the memory is freed by whoever holds it.
        unsafe { result::malloc_sync(bytes.max(1)) }.map_err(doing(|| format!("allocating {bytes} bytes")))
    }

    fn free(&self, at: u64) {
        if self.current().is_ok() {
            // SAFETY: it came from `allocate`, and is freed once.
            let _ = unsafe { result::free_sync(at) };
        }
    }

    fn write(&self, to: u64, from: &[u8], stream: Stream) -> Result<()> {
        self.current()?;
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: the target is as large, and the source lives until the driver has it, which for memory that is not
        // pinned is before it returns.
        unsafe { result::memcpy_htod_async(to, from, stream_of(stream)) }
            .map_err(doing(|| format!("copying {} bytes in", from.len())))
    }

    fn read(&self, to: &mut [u8], from: u64, stream: Stream) -> Result<()> {
        self.current()?;
        if to.is_empty() {
            return Ok(());
        }
        let len = to.len();
        // SAFETY: the source is as large, and the target lives until the stream has been waited for.
        unsafe { result::memcpy_dtoh_async(to, from, stream_of(stream)) }
            .map_err(doing(|| format!("copying {len} bytes out")))?;
        self.wait(stream)
    }

    fn zero(&self, at: u64, bytes: usize, stream: Stream) -> Result<()> {
        self.current()?;
        // SAFETY: the memory is as large.
        unsafe { result::memset_d8_async(at, 0, bytes, stream_of(stream)) }
            .map_err(doing(|| format!("clearing {bytes} bytes")))
    }

    fn wait(&self, stream: Stream) -> Result<()> {
        self.current()?;
        // SAFETY: the stream is the caller's, and there.
        unsafe { result::stream::synchronize(stream_of(stream)) }.map_err(doing(|| "waiting for the card".into()))
    }

    fn module(&self, program: &Program) -> Result<Arc<dyn Module>> {
        let name = program.name();
        let modules = || self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules().get(&name) {
            return Ok(module.clone());
        }
        let (compiler, architecture) = (Compiler::find(), self.card.architecture());
        let (source, options) = (program.source(), program.options());
        // Without a compiler, what an earlier one left in the cache will do.
        let version = compiler.as_ref().map_or((0, 0), |compiler| compiler.version());
        let key = Key::new(&source, &options, &architecture, version);
        let code =
            self.cache.get(program.file(), &key, || compiler?.compile(&name, &source, &architecture, &options))?;
        self.current()?;
        // SAFETY: the code is an image made by the compiler, whole, and lives through the call.
        let module = unsafe { result::module::load_data(code.as_ptr().cast::<c_void>()) }
            .map_err(doing(|| format!("loading kernel `{name}` for {architecture}")))?;
        // Threads may have compiled the same at once, which is better than one waiting for all: the first stays.
        let module: Arc<dyn Module> = Arc::new(Loaded(module as usize));
        Ok(modules().entry(name).or_insert(module).clone())
    }

    fn kernel(&self, module: &Arc<dyn Module>, name: &'static str, threads: u32, shared: u32) -> Result<Kernel> {
        let failed = doing(move || format!("finding kernel `{name}` ({threads} threads, {shared} bytes shared)"));
        let handle = handle_of(module)?;
        let text = CString::new(name).expect("a name of ours");
        self.current()?;
        // SAFETY: the module is loaded for as long as this lives.
        let function = unsafe { result::module::get_function(handle as sys::CUmodule, text) }.map_err(&failed)?;
        if shared > 48 * 1024 {
            let which = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is the module's.
            unsafe { result::function::set_function_attribute(function, which, shared as i32) }.map_err(&failed)?;
        }
        Ok(Kernel { module: module.clone(), name, function: function as usize, threads, shared })
    }

    fn global(&self, module: &Arc<dyn Module>, name: &'static str, to: &mut [u8]) -> Result<()> {
        let handle = handle_of(module)?;
        let text = CString::new(name).expect("a name of ours");
        self.current()?;
        // SAFETY: the module is loaded for as long as this lives.
        let (at, bytes) = unsafe { result::module::get_global(handle as sys::CUmodule, text) }
            .map_err(doing(move || format!("finding global `{name}`")))?;
        if bytes < to.len() {
            return Err(Error::memory("global", format!("`{name}` has {bytes} bytes, expected {}", to.len())));
        }
        self.read(to, at, Stream(0))
    }

    unsafe fn launch(&self, kernel: &Kernel, grid: [u32; 2], stream: Stream, parameters: &[*const u8]) -> Result<()> {
        self.current()?;
        let mut parameters: [*mut c_void; 8] =
            std::array::from_fn(|at| parameters.get(at).map_or(std::ptr::null_mut(), |p| p.cast_mut().cast()));
        let (grid, block) = ((grid[0], grid[1], 1), (kernel.threads, 1, 1));
        // SAFETY: as the caller promises; the driver copies the parameters before it returns.
        unsafe {
            result::launch_kernel(
                kernel.function as sys::CUfunction,
                grid,
                block,
                kernel.shared,
                stream_of(stream),
                &mut parameters,
            )
        }
        .map_err(doing(|| {
            let Kernel { name, threads, shared, .. } = kernel;
            format!("launching `{name}` over {grid:?} blocks of {threads} threads with {shared} bytes shared")
        }))
    }

    unsafe fn launch_early(
        &self,
        kernel: &Kernel,
        grid: [u32; 2],
        stream: Stream,
        parameters: &[*const u8],
    ) -> Result<()> {
        if self.card.capability < (9, 0) {
            // SAFETY: as the caller promises.
            return unsafe { self.launch(kernel, grid, stream, parameters) };
        }
        self.current()?;
        let mut parameters: [*mut c_void; 8] =
            std::array::from_fn(|at| parameters.get(at).map_or(std::ptr::null_mut(), |p| p.cast_mut().cast()));
        // SAFETY: both are plain numbers and pointers, for which zeros are values.
        let (mut attribute, mut config): (sys::CUlaunchAttribute, sys::CUlaunchConfig) = unsafe { std::mem::zeroed() };
        attribute.id = sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        (config.gridDimX, config.gridDimY, config.gridDimZ) = (grid[0], grid[1], 1);
        (config.blockDimX, config.blockDimY, config.blockDimZ) = (kernel.threads, 1, 1);
        (config.sharedMemBytes, config.hStream) = (kernel.shared, stream_of(stream));
        (config.attrs, config.numAttrs) = (&raw mut attribute, 1);
        let function = kernel.function as sys::CUfunction;
        // SAFETY: as the caller promises; the driver copies the parameters and the attribute before it returns.
        unsafe { sys::cuLaunchKernelEx(&raw const config, function, parameters.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .map_err(doing(|| {
                let Kernel { name, threads, shared, .. } = kernel;
                format!(
                    "launching `{name}` over {grid:?} blocks of {threads} threads with {shared} bytes shared, early"
                )
            }))
    }

    fn tensor_map(&self, at: u64, bf16: bool, axes: [u64; 4], strides: [u64; 3], rows: u32) -> Result<TensorMap> {
        let mut map = TensorMap([0; 16]);
        let kind = match bf16 {
            true => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            false => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        };
        let (copied, apart) = ([64, rows, 1, 1], [1; 4]);
        // SAFETY: the map is 128 bytes at a multiple of 64, and all arrays have the lengths that four axes ask for.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                (&raw mut map).cast(),
                kind,
                4,
                at as *mut c_void,
                axes.as_ptr(),
                strides.as_ptr(),
                copied.as_ptr(),
                apart.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()
        .map_err(doing(|| format!("mapping a tensor of {axes:?} with strides of {strides:?} bytes for copies")))?;
        Ok(map)
    }

    fn timed(&self, stream: Stream, work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        let failed = doing(|| "timing on the card".into());
        self.current()?;
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let (start, end) =
            (result::event::create(flags).map_err(&failed)?, result::event::create(flags).map_err(&failed)?);
        // SAFETY: both events are ours, recorded before they are waited for, and destroyed once.
        unsafe {
            let taken = (|| {
                result::event::record(start, stream_of(stream)).map_err(&failed)?;
                work()?;
                result::event::record(end, stream_of(stream)).map_err(&failed)?;
                result::event::synchronize(end).map_err(&failed)?;
                result::event::elapsed(start, end).map_err(&failed)
            })();
            let _ = (result::event::destroy(start), result::event::destroy(end));
            Ok(f64::from(taken?))
        }
    }
}
