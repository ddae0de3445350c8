//! Windows over images `[B, H, W, C]`: unfolding them into rows, of which a convolution is a linear map, and max
//! pooling over each window.

use crate::float::Float;
use crate::loops::{AddAssign, AddAt, MaxAssign, MaxPlaces};
use crate::tape::{Backward, BackwardContext, Tape, Var};
use crate::tensor::Tensor;
use qkv_cuda::operations::{Array, ImageWindows, Kind};
use std::ops::Range;

/// The windows of a convolution or of pooling over images; each pair is vertical, then horizontal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows2d {
    /// Height and width of a window, `K × L`.
    pub kernel: [usize; 2],
    /// Pixels from one window to the next.
    pub stride: [usize; 2],
    /// Padding rows above an image, and padding columns to its left.
    pub before: [usize; 2],
    /// Padding rows below an image, and padding columns to its right.
    pub after: [usize; 2],
}

impl Windows2d {
    /// Square windows, with the same padding on every side.
    pub fn square(kernel: usize, stride: usize, padding: usize) -> Self {
        let [kernel, stride, padding] = [kernel, stride, padding].map(|x| [x, x]);
        Windows2d { kernel, stride, before: padding, after: padding }
    }

    /// Square windows over images of `[H, W]`, padded so that there is one window per `stride` pixels: TensorFlow's
    /// `SAME`, with an odd row or column of padding at the end.
    pub fn same(size: [usize; 2], kernel: usize, stride: usize) -> Self {
        let pad = size.map(|n| ((n.div_ceil(stride).max(1) - 1) * stride + kernel).saturating_sub(n));
        Windows2d {
            before: pad.map(|pad| pad / 2),
            after: pad.map(|pad| pad - pad / 2),
            ..Self::square(kernel, stride, 0)
        }
    }

    /// Rows and columns of windows over images of `[H, W]`.
    pub fn count(self, size: [usize; 2]) -> [usize; 2] {
        [0, 1].map(|axis| {
            let padded = size[axis] + self.before[axis] + self.after[axis];
            padded.checked_sub(self.kernel[axis]).map_or(0, |rest| rest / self.stride[axis] + 1)
        })
    }

    /// The pixels along an axis covered by window `at`, and the place of the first of them in the window.
    fn seen(self, axis: usize, at: usize, length: usize) -> (Range<usize>, usize) {
        let start = at * self.stride[axis];
        let first = start.saturating_sub(self.before[axis]).min(length);
        let end = (start + self.kernel[axis]).saturating_sub(self.before[axis]).clamp(first, length);
        (first..end, self.before[axis].saturating_sub(start))
    }

    /// The pixels of an image `[H, W]` covered by window number `at`, row by row.
    fn pixels(self, at: usize, [height, width]: [usize; 2]) -> impl Iterator<Item = usize> {
        let [rows, columns] = self.count([height, width]);
        let (ys, xs) = (self.seen(0, at / columns % rows, height).0, self.seen(1, at % columns, width).0);
        ys.flat_map(move |y| xs.clone().map(move |x| y * width + x))
    }

    /// Fills `to` with the windows of images `x [B, H, W, C]` from number `first` on, the pixels of each window row by
    /// row, with zeros beyond the image.
    pub(super) fn gather<T: Float>(self, x: &[T], [height, width, channels]: [usize; 3], first: usize, to: &mut [T]) {
        let ([rows, columns], line) = (self.count([height, width]), self.kernel[1] * channels);
        let row = self.kernel[0] * line;
        if row == 0 || rows * columns == 0 {
            return;
        }
        for (at, window) in to.chunks_exact_mut(row).enumerate().map(|(at, window)| (first + at, window)) {
            let image = &x[at / (rows * columns) * height * width * channels..][..height * width * channels];
            let (ys, top) = self.seen(0, at / columns % rows, height);
            let (xs, left) = self.seen(1, at % columns, width);
            for (place, to) in window.chunks_exact_mut(line).enumerate() {
                let Some(from) = place.checked_sub(top).map(|down| ys.start + down).filter(|y| *y < ys.end) else {
                    to.fill(T::ZERO);
                    continue;
                };
                let pixels = &image[(from * width + xs.start) * channels..(from * width + xs.end) * channels];
                // A window entirely inside the padding covers no pixels, and `left` may lie beyond its end.
                let start = if pixels.is_empty() { 0 } else { left * channels };
                to[..start].fill(T::ZERO);
                to[start..start + pixels.len()].copy_from_slice(pixels);
                to[start + pixels.len()..].fill(T::ZERO);
            }
        }
    }

    /// The windows over images of `[H, W]` for a device.
    fn on_device(self, size: [usize; 2]) -> ImageWindows {
        let [kernel, stride, before, windows, size] =
            [self.kernel, self.stride, self.before, self.count(size), size].map(|pair| pair.map(|x| x as u32));
        ImageWindows { kernel, stride, before, windows, size }
    }

    fn check(self) {
        assert!(self.kernel.iter().chain(&self.stride).all(|&x| x > 0), "{self:?}");
    }
}

/// `[B, H, W, C]`.
pub(super) fn image_shape<T: Float>(x: &Var<T>) -> [usize; 4] {
    let &[batch, height, width, channels] = x.shape() else { panic!("images have four axes, not {:?}", x.shape()) };
    [batch, height, width, channels]
}

struct UnfoldBackward {
    x: Option<usize>,
    shape: [usize; 4],
    windows: Windows2d,
}

impl<T: Float> Backward<T> for UnfoldBackward {
    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let [batch, height, width, channels] = self.shape;
        let (windows, machine) = (self.windows, context.machine);
        if let Some(operations) = machine.cuda() {
            let Some((d_x, add)) = context.sum_array(self.x, &self.shape, operations) else { return };
            let windows = windows.on_device([height, width]);
            let d_y = upstream.array(operations);
            return operations.unfold2d_gradient(&d_y, &d_x, add, windows, [batch, channels]);
        }
        let [_, columns] = windows.count([height, width]);
        let row = windows.kernel[0] * windows.kernel[1] * channels;
        let Some(d_x) = context.sum(self.x, &self.shape) else { return };
        let each = (upstream.len() / self.shape[0].max(1)).max(1);
        let parts = d_x.chunks_mut((height * width * channels).max(1)).zip(upstream.data().chunks(each)).collect();
        machine.each(parts, |_, (d_x, upstream): (&mut [T], &[T])| {
            for (at, window) in upstream.chunks_exact(row.max(1)).enumerate() {
                let (ys, top) = windows.seen(0, at / columns, height);
                let (xs, left) = windows.seen(1, at % columns, width);
                for (place, y) in ys.enumerate() {
                    let sums = &mut d_x[(y * width + xs.start) * channels..(y * width + xs.end) * channels];
                    let from = ((top + place) * windows.kernel[1] + left) * channels;
                    machine.run(AddAssign(sums, &window[from..]));
                }
            }
        });
    }
}

struct MaxPoolBackward {
    x: Option<usize>,
    shape: [usize; 4],
    windows: Windows2d,
    /// For each output, the place of its maximum in its image.
    places: Places,
}

/// Places of maxima, in the memory in which they were computed.
enum Places {
    Host(Vec<u32>),
    Device(Array),
}

impl<T: Float> Backward<T> for MaxPoolBackward {
    fn backward(self: Box<Self>, upstream: Tensor<T>, context: &mut BackwardContext<'_, T>) {
        let [batch, height, width, channels] = self.shape;
        let machine = context.machine;
        let places = match (&self.places, machine.cuda()) {
            (Places::Device(places), Some(operations)) => {
                let Some((d_x, add)) = context.sum_array(self.x, &self.shape, operations) else { return };
                let windows = self.windows.on_device([height, width]);
                let from = [&upstream.array(operations), places];
                return operations.max_pool2d_gradient(from, &d_x, add, windows, [batch, channels]);
            }
            (Places::Device(_), None) => unreachable!("a tape stays on its device"),
            (Places::Host(places), _) => places,
        };
        let Some(d_x) = context.sum(self.x, &self.shape) else { return };
        let each = (places.len() / batch.max(1)).max(1);
        let outputs = upstream.data().chunks(each).zip(places.chunks(each));
        let parts = d_x.chunks_mut((height * width * channels).max(1)).zip(outputs).collect();
        machine.each(parts, |_, (d_x, (upstream, places)): (&mut [T], (&[T], &[u32]))| {
            machine.run(AddAt { sum: d_x, x: upstream, places });
        });
    }
}

impl<T: Float> Tape<'_, T> {
    /// The windows of images `x [B, H, W, C]`, the pixels of each window row by row, with zeros beyond the image:
    /// `[B, rows, columns, K·L·C]`.
    ///
    /// # Panics
    /// If `x` has another number of axes, or a window is empty.
    pub fn unfold2d(&mut self, x: &Var<T>, windows: Windows2d) -> Var<T> {
        let shape @ [batch, height, width, channels] = image_shape(x);
        windows.check();
        let [rows, columns] = windows.count([height, width]);
        let [kernel, across] = windows.kernel;
        let line = across * channels;
        if let Some(operations) = self.machine.cuda() {
            let y = Tensor::activations(operations, &[batch, rows, columns, kernel * line]);
            let (from, to) = (x.value.array(operations), y.array(operations));
            operations.unfold2d(&from, &to, windows.on_device([height, width]), [batch, channels]);
            let slot = x.slot;
            return self.record(y, self.depends(&[slot], &[]), || UnfoldBackward { x: slot, shape, windows });
        }
        let mut y = Tensor::unwritten(self.pool, &[batch, rows, columns, kernel * line]);
        let (x_data, row) = (x.value.data(), (kernel * line).max(1));
        let each = self.machine.rows_each(batch * rows * columns, row);
        let parts = y.data_mut().chunks_mut(each * row).collect();
        self.machine.each(parts, |part, y: &mut [T]| {
            windows.gather(x_data, [height, width, channels], part * each, y);
        });
        let slot = x.slot;
        self.record(y, self.depends(&[slot], &[]), || UnfoldBackward { x: slot, shape, windows })
    }

    /// The maximum of each channel over each window of images `x [B, H, W, C]`: `[B, rows, columns, C]`. Padding does
    /// not count; of equal maxima, the first gets the gradient.
    ///
    /// # Panics
    /// If `x` has another number of axes, or a window covers no pixel.
    pub fn max_pool2d(&mut self, x: &Var<T>, windows: Windows2d) -> Var<T> {
        let shape @ [batch, height, width, channels] = image_shape(x);
        windows.check();
        let [rows, columns] = windows.count([height, width]);
        let depends = self.depends(&[x.slot], &[]);
        if let Some(operations) = self.machine.cuda() {
            let sees =
                |axis: usize, count: usize, length| (0..count).all(|at| !windows.seen(axis, at, length).0.is_empty());
            assert!(sees(0, rows, height) && sees(1, columns, width), "{windows:?} sees nothing of {height} × {width}");
            let y = Tensor::activations(operations, &[batch, rows, columns, channels]);
            let places = operations.empty(Kind::U32, y.len(), "places of maxima");
            let from = x.value.array(operations);
            let into = [&y.array(operations), &places];
            operations.max_pool2d(&from, into, windows.on_device([height, width]), [batch, channels]);
            let (slot, places) = (x.slot, Places::Device(places));
            return self.record(y, depends, || MaxPoolBackward { x: slot, shape, windows, places });
        }
        let mut y = Tensor::unwritten(self.pool, &[batch, rows, columns, channels]);
        let x_data = x.value.data();
        let blind = format!("{windows:?} sees nothing of {height} × {width}");
        let pixel = |at: usize, pixel: usize| {
            &x_data[(at / (rows * columns) * height * width + pixel) * channels..][..channels]
        };
        let each = self.machine.rows_each(batch * rows * columns, channels);
        if !depends {
            // The places of the maxima are not needed.
            let parts = y.data_mut().chunks_mut((each * channels).max(1)).collect();
            self.machine.each(parts, |part, y: &mut [T]| {
                for (at, best) in (part * each..).zip(y.chunks_exact_mut(channels)) {
                    let mut seen = windows.pixels(at, [height, width]).map(|place| pixel(at, place));
                    best.copy_from_slice(seen.next().unwrap_or_else(|| panic!("{blind}")));
                    seen.for_each(|pixel| self.machine.run(MaxAssign(best, pixel)));
                }
            });
            return self.constant(y);
        }
        let mut places = vec![0u32; y.len()];
        let parts = y.data_mut().chunks_mut((each * channels).max(1));
        let parts = parts.zip(places.chunks_mut((each * channels).max(1))).collect();
        self.machine.each(parts, |part, (y, places): (&mut [T], &mut [u32])| {
            let outputs = y.chunks_exact_mut(channels).zip(places.chunks_exact_mut(channels));
            for (at, (best, places)) in (part * each..).zip(outputs) {
                let mut seen = windows.pixels(at, [height, width]);
                let first = seen.next().unwrap_or_else(|| panic!("{blind}"));
                best.copy_from_slice(pixel(at, first));
                places.iter_mut().enumerate().for_each(|(c, place)| *place = (first * channels + c) as u32);
                for from in seen {
                    let first = (from * channels) as u32;
                    self.machine.run(MaxPlaces { best, places, x: pixel(at, from), first });
                }
            }
        });
        let slot = x.slot;
        let places = Places::Host(places);
        self.record(y, depends, || MaxPoolBackward { x: slot, shape, windows, places })
    }
}
