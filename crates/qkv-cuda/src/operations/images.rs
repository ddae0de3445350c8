//! Images: windows of convolutions, pooling, group normalization.

use super::launch::{Argument, count};
use super::{Array, Kind, Operations};
use Argument::{F32, Ptr, U32};

/// Windows over images: `Windows2d` of `images.cu`. Pairs are vertical, horizontal.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ImageWindows {
    /// Height and width of a window.
    pub kernel: [u32; 2],
    /// Pixels from one window to the next.
    pub stride: [u32; 2],
    /// Padding above and on the left.
    pub before: [u32; 2],
    /// The number of rows and columns of windows.
    pub windows: [u32; 2],
    /// Height and width of an image.
    pub size: [u32; 2],
}

impl ImageWindows {
    fn pixels(&self) -> usize {
        self.size[0] as usize * self.size[1] as usize
    }

    fn outputs(&self) -> usize {
        self.windows[0] as usize * self.windows[1] as usize
    }

    fn area(&self) -> usize {
        self.kernel[0] as usize * self.kernel[1] as usize
    }
}

impl Operations {
    /// The windows of `batch` images `x [B, H, W, C]`, side by side: `y [B, rows, columns, K·L·C]`.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn unfold2d(&self, x: &Array, y: &Array, windows: ImageWindows, [batch, channels]: [usize; 2]) {
        let (kind, rows) = (self.activation_kind(), batch * windows.outputs() * windows.area());
        let pointers = [x.expect(kind, batch * windows.pixels() * channels), y.expect(kind, rows * channels)];
        let rest = [Argument::Windows(windows), count(rows), count(channels)];
        let grid = [self.blocks_of_eights(rows, channels), 1];
        // SAFETY: `unfold2d(const T*, T*, Windows2d, u32, int)`.
        unsafe { self.launch("unfold2d", grid, &[&pointers.map(Ptr)[..], &rest].concat()) };
    }

    /// The gradient of [`unfold2d`](Operations::unfold2d), written to `d_x` or added to it.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn unfold2d_gradient(
        &self,
        d_y: &Array,
        d_x: &Array,
        add: bool,
        windows: ImageWindows,
        [batch, channels]: [usize; 2],
    ) {
        let (kind, rows) = (self.activation_kind(), batch * windows.pixels());
        let needed = batch * windows.outputs() * windows.area() * channels;
        let pointers = [d_y.expect(kind, needed), d_x.expect(kind, rows * channels)];
        let rest = [Argument::Windows(windows), count(rows), count(channels), U32(u32::from(add))];
        let grid = [self.blocks_of_eights(rows, channels), 1];
        // SAFETY: `unfold2d_gradient(const T*, T*, Windows2d, u32, int, int)`.
        unsafe { self.launch("unfold2d_gradient", grid, &[&pointers.map(Ptr)[..], &rest].concat()) };
    }

    /// The maximum of each channel over each window; its position in the image goes to `places`, u32. Every window must
    /// see a pixel.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn max_pool2d(
        &self,
        x: &Array,
        [y, places]: [&Array; 2],
        windows: ImageWindows,
        [batch, channels]: [usize; 2],
    ) {
        let (kind, outputs) = (self.activation_kind(), batch * windows.outputs() * channels);
        let pointers = [
            x.expect(kind, batch * windows.pixels() * channels),
            y.expect(kind, outputs),
            places.expect(Kind::U32, outputs),
        ];
        let rest = [Argument::Windows(windows), count(outputs), count(channels)];
        let grid = [self.blocks(outputs), 1];
        // SAFETY: `max_pool2d(const T*, T*, u32*, Windows2d, u32, u32)`.
        unsafe { self.launch("max_pool2d", grid, &[&pointers.map(Ptr)[..], &rest].concat()) };
    }

    /// The gradient of [`max_pool2d`](Operations::max_pool2d), written to `d_x` or added to it.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn max_pool2d_gradient(
        &self,
        [d_y, places]: [&Array; 2],
        d_x: &Array,
        add: bool,
        windows: ImageWindows,
        [batch, channels]: [usize; 2],
    ) {
        let (kind, outputs) = (self.activation_kind(), batch * windows.outputs() * channels);
        let inputs = batch * windows.pixels() * channels;
        let pointers = [d_y.expect(kind, outputs), places.expect(Kind::U32, outputs), d_x.expect(kind, inputs)];
        let rest = [Argument::Windows(windows), count(inputs), count(channels), U32(u32::from(add))];
        let grid = [self.blocks(inputs), 1];
        // SAFETY: `max_pool2d_gradient(const T*, const u32*, T*, Windows2d, u32, u32, int)`.
        unsafe { self.launch("max_pool2d_gradient", grid, &[&pointers.map(Ptr)[..], &rest].concat()) };
    }

    /// Group normalization of `batch` images of `pixels` pixels; the mean and inverse deviation of each group go to
    /// `moments`, `[B, groups, 2]`.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn group_norm(
        &self,
        x: &Array,
        [y, moments]: [&Array; 2],
        [gain, bias]: [&Array; 2],
        [batch, pixels, channels, groups]: [usize; 4],
        epsilon: f32,
    ) {
        let (kind, len) = (self.activation_kind(), batch * pixels * channels);
        let pointers = [
            x.expect(kind, len),
            y.expect(kind, len),
            moments.expect(Kind::F32, 2 * batch * groups),
            gain.expect(Kind::F32, channels),
            bias.expect(Kind::F32, channels),
        ];
        let rest = [count(pixels), count(channels), count(groups), F32(epsilon)];
        let grid = [batch * groups, usize::from(len > 0)];
        // SAFETY: `group_norm(const T*, T*, float*, const float*, const float*, u32, u32, u32, float)`.
        unsafe { self.launch("group_norm", grid, &[&pointers.map(Ptr)[..], &rest].concat()) };
    }

    /// Like [`layer_norm_gradient`](Operations::layer_norm_gradient), for groups.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn group_norm_gradient(
        &self,
        [x, d_y, moments, gain]: [&Array; 4],
        d_x: &Array,
        add: bool,
        sums: [Option<&Array>; 2],
        [batch, pixels, channels, groups]: [usize; 4],
    ) {
        let (kind, len) = (self.activation_kind(), batch * pixels * channels);
        if len == 0 {
            return;
        }
        let partial = self.empty(Kind::F32, batch * 2 * channels, "gradients of a norm");
        let pointers = [
            x.expect(kind, len),
            d_y.expect(kind, len),
            d_x.expect(kind, len),
            moments.expect(Kind::F32, 2 * batch * groups),
            gain.expect(Kind::F32, channels),
            partial.ptr(),
        ];
        let rest = [count(pixels), count(channels), count(groups), U32(u32::from(add))];
        // SAFETY: `group_norm_gradient(const T* × 2, T*, const float* × 2, float*, u32 × 3, int)`.
        unsafe { self.launch("group_norm_gradient", [batch * groups, 1], &[&pointers.map(Ptr)[..], &rest].concat()) };
        self.add_partials(&partial, sums, batch, [2 * channels, channels]);
    }
}
