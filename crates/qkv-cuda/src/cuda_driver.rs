//! [`Driver`] over NVIDIA's driver library. Each call pushes the device's primary context and pops it before returning,
//! even on failure, so that the context current on the caller's thread (PyTorch's or candle's, say) stays current.
//! Errors carry the driver's message.

mod small_copy;

use crate::cache::{Cache, Key};
use crate::cublas::CublasLt;
use crate::device::{Device, Stream};
use crate::driver::{Driver, Kernel, MAX_ARGUMENTS, Module, PendingCopy, Source, TensorMap};
use crate::error::{Error, Result};
use crate::libcuda::{
    CAPTURE_RELAXED, Code, LaunchAttribute, LaunchConfig, LibCuda, MAX_DYNAMIC_SHARED_BYTES, NO_DEVICE,
    STREAM_NON_BLOCKING,
};
use crate::libcuda::{attribute, tensor_map};
use crate::matmul::Matmul;
use crate::nvrtc::Compiler;
use crate::staging::{HALF, STAGING_BYTES, Staging};
use small_copy::{Slots, SmallCopy};
use std::any::Any;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A GPU of this machine.
#[derive(Debug)]
pub(crate) struct CudaDriver {
    cuda: &'static LibCuda,
    device: Device,
    /// The device's primary context, as an address. It is retained for the life of the process: creating one takes
    /// longer than most uses, and modules live in it.
    context: usize,
    cache: Cache,
    modules: Mutex<HashMap<String, Arc<dyn Module>>>,
    /// For copies between host and device.
    staging: Mutex<Option<(Staging, StagingEvents)>>,
    /// For deferred copies.
    slots: Slots,
    /// Loaded with the first product.
    cublas: OnceLock<Result<Mutex<CublasLt>>>,
}

/// A `CUmodule`, as an address.
#[derive(Debug)]
struct Loaded(usize);

impl Module for Loaded {
    fn any(&self) -> &dyn Any {
        self
    }
}

/// The device's context on top of this thread's stack of contexts, until dropped.
#[derive(Debug)]
struct PushedContext<'a> {
    cuda: &'a LibCuda,
}

impl<'a> PushedContext<'a> {
    fn push(cuda: &'a LibCuda, context: usize) -> Result<PushedContext<'a>> {
        // SAFETY: the context is retained for the life of the process.
        check(cuda, unsafe { (cuda.push_context)(context as *mut c_void) }, || "pushing the device's context".into())?;
        Ok(PushedContext { cuda })
    }
}

impl Drop for PushedContext<'_> {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // SAFETY: it pops what `push` pushed on this thread; guards are dropped in reverse order.
        let _ = unsafe { (self.cuda.pop_context)(&mut popped) };
    }
}

fn check(cuda: &LibCuda, code: Code, action: impl FnOnce() -> String) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(Error::Driver { action: action(), message: cuda.message(code) }) }
}

impl CudaDriver {
    /// The number of GPUs.
    pub fn count() -> Result<usize> {
        CudaDriver::count_by(LibCuda::find()?)
    }

    /// The GPU with this number, from 0.
    pub fn new(number: usize, cache: Cache) -> Result<CudaDriver> {
        CudaDriver::with_library(LibCuda::find()?, number, cache)
    }

    fn count_by(cuda: &LibCuda) -> Result<usize> {
        // SAFETY: initializing has no precondition and may be repeated.
        match unsafe { (cuda.init)(0) } {
            NO_DEVICE => return Ok(0),
            code => check(cuda, code, || "initializing the driver".into())?,
        }
        let mut count = 0;
        // SAFETY: it writes one number.
        check(cuda, unsafe { (cuda.device_count)(&mut count) }, || "counting GPUs".into())?;
        Ok(count.max(0) as usize)
    }

    fn with_library(cuda: &'static LibCuda, number: usize, cache: Cache) -> Result<CudaDriver> {
        let found = CudaDriver::count_by(cuda)?;
        if number >= found {
            return Err(Error::NoDevice { number, found });
        }
        let check = |code| check(cuda, code, || format!("opening GPU {number}"));
        let mut device = 0;
        // SAFETY: it writes one number.
        check(unsafe { (cuda.device)(&mut device, number as c_int) })?;
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: it writes one number; the device is the driver's.
            check(unsafe { (cuda.device_attribute)(&mut value, which, device) }).map(|()| value.max(0) as u32)
        };
        let capability =
            (attribute(attribute::COMPUTE_CAPABILITY_MAJOR)?, attribute(attribute::COMPUTE_CAPABILITY_MINOR)?);
        let mut name = [0u8; 128];
        // SAFETY: the buffer has the length given; the driver ends the text with a zero.
        check(unsafe { (cuda.device_name)(name.as_mut_ptr().cast(), name.len() as c_int - 1, device) })?;
        let name = CStr::from_bytes_until_nul(&name).map_or(String::new(), |name| name.to_string_lossy().into_owned());
        if capability < (8, 0) {
            return Err(Error::TooOld { name, capability });
        }
        let (mut version, mut memory_bytes, mut context) = (0, 0, ptr::null_mut());
        // SAFETY: each writes one number or pointer; the device is the driver's.
        unsafe {
            check((cuda.driver_version)(&mut version))?;
            check((cuda.device_memory)(&mut memory_bytes, device))?;
            check((cuda.retain_context)(&mut context, device))?;
        }
        let device = Device {
            name,
            capability,
            processors: attribute(attribute::MULTIPROCESSOR_COUNT)?,
            shared_bytes: attribute(attribute::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
            memory_bytes: memory_bytes as u64,
            driver: (version as u32 / 1000, version as u32 % 1000 / 10),
        };
        Ok(CudaDriver {
            cuda,
            device,
            context: context as usize,
            cache,
            modules: Mutex::default(),
            staging: Mutex::default(),
            slots: Slots::default(),
            cublas: OnceLock::new(),
        })
    }

    /// Calls the driver with the device's context current, and restores the thread's own afterwards.
    fn call<R>(&self, work: impl FnOnce(&LibCuda) -> Result<R>) -> Result<R> {
        let _context = PushedContext::push(self.cuda, self.context)?;
        work(self.cuda)
    }

    /// Calls the driver with exclusive use of the staging memory.
    fn staged(&self, work: impl FnOnce(&LibCuda, &mut Staging, &StagingEvents) -> Result<()>) -> Result<()> {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        self.call(|cuda| {
            let (staging, events) = match &mut *staging {
                Some(staging) => staging,
                none => none.insert(new_staging(cuda)?),
            };
            work(cuda, staging, events)
        })
    }

    /// # Safety
    /// As for [`Driver::launch`].
    unsafe fn launch_with(
        &self,
        kernel: &Kernel,
        grid: [u32; 2],
        stream: Stream,
        arguments: &[*const u8],
        dependent: bool,
    ) -> Result<()> {
        assert!(arguments.len() <= MAX_ARGUMENTS, "`{}` takes {} arguments", kernel.name, arguments.len());
        let mut parameters: [*mut c_void; MAX_ARGUMENTS] =
            std::array::from_fn(|at| arguments.get(at).map_or(ptr::null_mut(), |p| p.cast_mut().cast()));
        let mut attribute = LaunchAttribute::programmatic_stream_serialization();
        let config = LaunchConfig {
            grid: [grid[0], grid[1], 1],
            block: [kernel.threads, 1, 1],
            shared_bytes: kernel.shared,
            stream: handle(stream),
            attributes: &raw mut attribute,
            attribute_count: u32::from(dependent),
        };
        let function = kernel.function as *mut c_void;
        self.call(|cuda| {
            // SAFETY: as the caller promises; the driver copies arguments and attribute before it returns.
            let code = unsafe { (cuda.launch)(&raw const config, function, parameters.as_mut_ptr(), ptr::null_mut()) };
            check(cuda, code, || {
                let Kernel { name, threads, shared, .. } = kernel;
                let kind = if dependent { " as a dependent launch" } else { "" };
                format!("launching `{name}` over {grid:?} blocks of {threads} threads, {shared} bytes shared{kind}")
            })
        })
    }
}

/// One event per half of the staging memory, recorded after its last copy.
#[derive(Debug)]
struct StagingEvents([usize; 2]);

impl StagingEvents {
    fn record(&self, cuda: &LibCuda, half: usize, stream: Stream) -> Result<()> {
        // SAFETY: the event exists, and the stream is the caller's.
        let code = unsafe { (cuda.record_event)(self.0[half] as *mut c_void, handle(stream)) };
        check(cuda, code, || "staging a copy".into())
    }

    fn wait(&self, cuda: &LibCuda, half: usize) -> Result<()> {
        // SAFETY: the event exists; one that was never recorded counts as done.
        let code = unsafe { (cuda.synchronize_event)(self.0[half] as *mut c_void) };
        check(cuda, code, || "waiting for a staged copy".into())
    }
}

/// Page-locked memory and its events, for the life of the process.
fn new_staging(cuda: &LibCuda) -> Result<(Staging, StagingEvents)> {
    let check = |code| check(cuda, code, || "allocating page-locked memory".into());
    let (mut memory, mut events) = (ptr::null_mut(), [ptr::null_mut(); 2]);
    // SAFETY: each call writes one pointer; the context is current.
    unsafe {
        check((cuda.allocate_pinned)(&mut memory, STAGING_BYTES))?;
        for event in &mut events {
            check((cuda.create_event)(event, 0))?;
        }
    }
    let memory = ptr::NonNull::new(memory.cast()).ok_or_else(|| Error::memory("staging", "is not there"))?;
    Ok((Staging::new(memory), StagingEvents(events.map(|event| event as usize))))
}

fn handle(stream: Stream) -> *mut c_void {
    stream.0 as *mut c_void
}

fn handle_of(module: &Arc<dyn Module>) -> Result<*mut c_void> {
    let loaded = module.any().downcast_ref::<Loaded>();
    loaded.map(|loaded| loaded.0 as *mut c_void).ok_or_else(|| Error::memory("module", "was loaded by another driver"))
}

impl CudaDriver {
    fn create_stream(&self, flags: u32) -> Result<Stream> {
        let mut stream = ptr::null_mut();
        self.call(|cuda| {
            // SAFETY: it writes one pointer. Without flags, the stream is ordered with the default stream.
            check(cuda, unsafe { (cuda.create_stream)(&mut stream, flags) }, || "creating a stream".into())
        })?;
        Ok(Stream(stream as u64))
    }
}

impl Driver for CudaDriver {
    fn device(&self) -> &Device {
        &self.device
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let mut ptr = 0;
        self.call(|cuda| {
            // SAFETY: it writes one address; the owner of the memory frees it.
            let code = unsafe { (cuda.allocate)(&mut ptr, bytes.max(1)) };
            check(cuda, code, || format!("allocating {bytes} bytes"))
        })?;
        Ok(ptr)
    }

    fn free(&self, ptr: u64) {
        // SAFETY: `allocate` returned it, and it is freed once.
        let _ = self.call(|cuda| check(cuda, unsafe { (cuda.free)(ptr) }, || "freeing memory".into()));
    }

    fn write(&self, to: u64, from: &[u8], stream: Stream) -> Result<()> {
        for (at, part) in from.chunks(HALF).enumerate() {
            self.staged(|cuda, staging, events| {
                let staged = staging.put(part, |half| events.wait(cuda, half))?;
                let (to, len) = (to + (at * HALF) as u64, part.len());
                // SAFETY: the target is as large, and the staging memory is not modified until an event reports that it
                // was copied.
                let code = unsafe { (cuda.copy_to_device)(to, staged.ptr.cast(), len, handle(stream)) };
                check(cuda, code, || format!("copying {len} bytes to the device"))?;
                events.record(cuda, staged.half, stream)
            })?;
        }
        Ok(())
    }

    fn read(&self, to: &mut [u8], from: u64, stream: Stream) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        self.staged(|cuda, staging, events| {
            // The halves may hold data that is still in flight to the device.
            (0..2).try_for_each(|half| events.wait(cuda, half))?;
            let begin = |at: usize, len: usize| {
                // SAFETY: the source is as large, and the half is free: its previous contents have been copied out.
                let code = unsafe {
                    let to = staging.half(at % 2).cast();
                    (cuda.copy_to_host)(to, from + (at * HALF) as u64, len, handle(stream))
                };
                check(cuda, code, || format!("copying {len} bytes to the host"))?;
                events.record(cuda, at % 2, stream)
            };
            let mut parts = to.chunks_mut(HALF).enumerate().peekable();
            begin(0, parts.peek().map_or(0, |(_, part)| part.len()))?;
            while let Some((at, part)) = parts.next() {
                // The device fills the next half while the host empties this one.
                if let Some((next, part)) = parts.peek() {
                    begin(*next, part.len())?;
                }
                events.wait(cuda, at % 2)?;
                // SAFETY: the half is as large, and the device has written it.
                unsafe { ptr::copy_nonoverlapping(staging.half(at % 2), part.as_mut_ptr(), part.len()) };
            }
            Ok(())
        })
    }

    fn read_later(&self, from: u64, bytes: usize, stream: Stream) -> Result<Box<dyn PendingCopy>> {
        let begin = |_: &LibCuda| SmallCopy::begin((self.cuda, self.context), &self.slots, from, bytes, stream);
        Ok(Box::new(self.call(begin)?))
    }

    fn copy(&self, to: u64, from: u64, bytes: usize, stream: Stream) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.call(|cuda| {
            // SAFETY: both are as large, in memory of this device.
            let code = unsafe { (cuda.copy_on_device)(to, from, bytes, handle(stream)) };
            check(cuda, code, || format!("copying {bytes} bytes on the device"))
        })
    }

    fn zero(&self, ptr: u64, bytes: usize, stream: Stream) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.call(|cuda| {
            // SAFETY: the memory is as large.
            check(cuda, unsafe { (cuda.fill_bytes)(ptr, 0, bytes, handle(stream)) }, || {
                format!("zeroing {bytes} bytes")
            })
        })
    }

    fn wait(&self, stream: Stream) -> Result<()> {
        self.call(|cuda| {
            // SAFETY: the stream is the caller's.
            check(cuda, unsafe { (cuda.synchronize)(handle(stream)) }, || "waiting for the stream".into())
        })
    }

    fn new_stream(&self) -> Result<Stream> {
        self.create_stream(0)
    }

    fn new_recording_stream(&self) -> Result<Stream> {
        self.create_stream(STREAM_NON_BLOCKING)
    }

    fn begin_capture(&self, stream: Stream) -> Result<bool> {
        if stream.0 == 0 {
            return Ok(false);
        }
        self.call(|cuda| {
            // SAFETY: the stream is the caller's.
            let code = unsafe { (cuda.begin_capture)(handle(stream), CAPTURE_RELAXED) };
            check(cuda, code, || "recording a stream".into())
        })?;
        Ok(true)
    }

    fn end_capture(&self, stream: Stream) -> Result<usize> {
        self.call(|cuda| {
            let (mut recording, mut graph) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: each writes one pointer; the recording is freed once, after the graph was instantiated from it.
            unsafe {
                let ended = (cuda.end_capture)(handle(stream), &mut recording);
                check(cuda, ended, || "ending the recording of a stream".into())?;
                let made = (cuda.instantiate_graph)(&mut graph, recording, 0);
                let _ = (cuda.free_recording)(recording);
                check(cuda, made, || "making a graph of recorded work".into())?;
            }
            Ok(graph as usize)
        })
    }

    fn launch_graph(&self, graph: usize, stream: Stream) -> Result<()> {
        self.call(|cuda| {
            // SAFETY: `end_capture` made the graph; the stream is the caller's.
            let code = unsafe { (cuda.launch_graph)(graph as *mut c_void, handle(stream)) };
            check(cuda, code, || "launching a graph".into())
        })
    }

    fn free_graph(&self, graph: usize) {
        // SAFETY: `end_capture` made it, and it is freed once; the driver waits until it has run.
        let freed = |cuda: &LibCuda| check(cuda, unsafe { (cuda.free_graph)(graph as *mut c_void) }, String::new);
        let _ = self.call(freed);
    }

    fn is_capturing(&self, stream: Stream) -> Result<bool> {
        // The default stream cannot be captured.
        if stream.0 == 0 {
            return Ok(false);
        }
        let mut status = 0;
        self.call(|cuda| {
            // SAFETY: it writes one number; the stream is the caller's.
            let code = unsafe { (cuda.is_capturing)(handle(stream), &mut status) };
            check(cuda, code, || "asking whether the stream is captured".into())
        })?;
        Ok(status != 0)
    }

    fn module(&self, source: &Source) -> Result<Arc<dyn Module>> {
        let modules = || self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules().get(&source.name) {
            return Ok(module.clone());
        }
        let Source { name, cache_prefix, text, options, .. } = source;
        let (compiler, architecture) = (Compiler::find(), self.device.architecture());
        // The compiler's version is part of the key: without a compiler, no entry matches and this fails.
        let version = compiler.as_ref().map_or((0, 0), |compiler| compiler.version());
        let key = Key::new(text, options, &architecture, version);
        let code = self.cache.get(cache_prefix, &key, || compiler?.compile(name, text, &architecture, options))?;
        let mut module = ptr::null_mut();
        self.call(|cuda| {
            // SAFETY: the code is a complete image from the compiler, and outlives the call.
            let code = unsafe { (cuda.load_module)(&mut module, code.as_ptr().cast()) };
            check(cuda, code, || format!("loading kernel `{name}` for {architecture}"))
        })?;
        // Several threads may have compiled the same module at once; the first one stays.
        let module: Arc<dyn Module> = Arc::new(Loaded(module as usize));
        Ok(modules().entry(name.clone()).or_insert(module).clone())
    }

    fn kernel(&self, module: &Arc<dyn Module>, name: &'static str, threads: u32, shared: u32) -> Result<Kernel> {
        let handle = handle_of(module)?;
        let text = CString::new(name).expect("kernel names have no zero byte");
        let mut function = ptr::null_mut();
        self.call(|cuda| {
            let check = |code| {
                check(cuda, code, || format!("finding kernel `{name}` ({threads} threads, {shared} bytes shared)"))
            };
            // SAFETY: the module stays loaded; the name is a C string.
            check(unsafe { (cuda.module_function)(&mut function, handle, text.as_ptr()) })?;
            if shared > 48 * 1024 {
                // SAFETY: the function is the module's.
                check(unsafe { (cuda.set_function_attribute)(function, MAX_DYNAMIC_SHARED_BYTES, shared as c_int) })?;
            }
            Ok(())
        })?;
        Ok(Kernel { module: module.clone(), name, function: function as usize, threads, shared })
    }

    fn global(&self, module: &Arc<dyn Module>, name: &'static str, to: &mut [u8]) -> Result<()> {
        let handle = handle_of(module)?;
        let text = CString::new(name).expect("variable names have no zero byte");
        let (mut ptr, mut bytes) = (0, 0);
        self.call(|cuda| {
            // SAFETY: the module stays loaded; the name is a C string.
            let code = unsafe { (cuda.module_global)(&mut ptr, &mut bytes, handle, text.as_ptr()) };
            check(cuda, code, || format!("finding variable `{name}`"))
        })?;
        if bytes < to.len() {
            return Err(Error::memory("variable", format!("`{name}` has {bytes} bytes, expected {}", to.len())));
        }
        self.read(to, ptr, Stream(0))
    }

    unsafe fn launch(&self, kernel: &Kernel, grid: [u32; 2], stream: Stream, arguments: &[*const u8]) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.launch_with(kernel, grid, stream, arguments, false) }
    }

    unsafe fn launch_dependent(
        &self,
        kernel: &Kernel,
        grid: [u32; 2],
        stream: Stream,
        arguments: &[*const u8],
    ) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.launch_with(kernel, grid, stream, arguments, self.device.capability >= (9, 0)) }
    }

    unsafe fn matmul(&self, call: &Matmul, stream: Stream) -> Result<()> {
        let cublas = self.cublas.get_or_init(|| self.call(|_| CublasLt::new()).map(Mutex::new));
        let cublas = cublas.as_ref().map_err(Clone::clone)?;
        let mut cublas = cublas.lock().unwrap_or_else(PoisonError::into_inner);
        if !cublas.has_workspace() {
            cublas.set_workspace(self.allocate(CublasLt::WORKSPACE_BYTES)?);
        }
        // SAFETY: as the caller promises; the context is current, and the workspace is this driver's.
        self.call(|_| unsafe { cublas.matmul(call, stream) })
    }

    fn tensor_map(&self, ptr: u64, bf16: bool, dims: [u64; 4], strides: [u64; 3], rows: u32) -> Result<TensorMap> {
        let mut map = TensorMap([0; 16]);
        let (boxes, steps) = ([64, rows, 1, 1], [1; 4]);
        self.call(|cuda| {
            // SAFETY: the map is 128 bytes, aligned to 64; the arrays have the lengths that rank 4 requires.
            let code = unsafe {
                (cuda.encode_tensor_map)(
                    (&raw mut map).cast(),
                    if bf16 { tensor_map::BFLOAT16 } else { tensor_map::FLOAT16 },
                    4,
                    ptr as *mut c_void,
                    dims.as_ptr(),
                    strides.as_ptr(),
                    boxes.as_ptr(),
                    steps.as_ptr(),
                    tensor_map::INTERLEAVE_NONE,
                    tensor_map::SWIZZLE_128B,
                    tensor_map::L2_PROMOTION_256B,
                    tensor_map::OOB_FILL_NONE,
                )
            };
            check(cuda, code, || format!("encoding a tensor map of {dims:?} with strides of {strides:?} bytes"))
        })?;
        Ok(map)
    }

    fn timed(&self, stream: Stream, work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        self.call(|cuda| {
            let check = |code| check(cuda, code, || "timing on the device".into());
            let mut events = [ptr::null_mut(); 2];
            for event in &mut events {
                // SAFETY: it writes one pointer.
                check(unsafe { (cuda.create_event)(event, 0) })?;
            }
            let [start, end] = events;
            let mut milliseconds = 0.0;
            // SAFETY: both events exist, and are recorded before they are waited for.
            let timed = (|| unsafe {
                check((cuda.record_event)(start, handle(stream)))?;
                work()?;
                check((cuda.record_event)(end, handle(stream)))?;
                check((cuda.synchronize_event)(end))?;
                check((cuda.event_milliseconds)(&mut milliseconds, start, end))
            })();
            for event in events {
                // SAFETY: each is destroyed once.
                let _ = unsafe { (cuda.destroy_event)(event) };
            }
            timed.map(|()| f64::from(milliseconds))
        })
    }
}

#[cfg(test)]
mod tests;
