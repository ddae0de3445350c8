//! BMP files of every depth, written here, and malformed ones.

use qkv_formats::image::Image;

/// A file with the Windows header; its pixel rows are padded to four bytes, from the bottom up.
struct Bitmap {
    size: [i32; 2],
    bits: u16,
    stored: u32,
    /// The bytes between header and pixels: masks, then a palette.
    between: Vec<u8>,
    colors: u32,
    pixels: Vec<u8>,
}

impl Bitmap {
    fn plain(size: [i32; 2], bits: u16, palette: &[[u8; 3]], pixels: &[u8]) -> Bitmap {
        let between = palette.iter().flat_map(|&[r, g, b]| [b, g, r, 0]).collect();
        Bitmap { size, bits, stored: 0, between, colors: palette.len() as u32, pixels: pixels.to_vec() }
    }

    fn bytes(&self) -> Vec<u8> {
        let start = 54 + self.between.len() as u32;
        let mut bytes = b"BM".to_vec();
        let [width, height] = self.size.map(|side| side as u32);
        let (planes, length) = (u32::from(self.bits) << 16 | 1, self.pixels.len() as u32);
        for number in [start + length, 0, start, 40, width, height, planes, self.stored, length, 0, 0, self.colors, 0] {
            bytes.extend(number.to_le_bytes());
        }
        [bytes, self.between.clone(), self.pixels.clone()].concat()
    }
}

fn read(bytes: &[u8]) -> Image {
    Image::from_bytes(bytes, "a.bmp").unwrap()
}

fn refused(bytes: &[u8]) -> String {
    Image::from_bytes(bytes, "a.bmp").expect_err("it is broken").to_string()
}

fn colors(bitmap: &Bitmap) -> Vec<u8> {
    let image = read(&bitmap.bytes());
    assert_eq!([image.width() as i32, image.height() as i32], [bitmap.size[0], bitmap.size[1].abs()]);
    assert_eq!(image.channels(), 3);
    image.points().to_vec()
}

/// The palette that pixels index.
const PALETTE: [[u8; 3]; 4] = [[1, 2, 3], [40, 50, 60], [77, 88, 99], [200, 210, 220]];

fn in_palette(places: &[usize]) -> Vec<u8> {
    places.iter().flat_map(|&place| PALETTE[place]).collect()
}

#[test]
fn the_smallest_bitmaps_are_read() {
    let cases = [
        ([1, 1], 24, vec![3, 2, 1, 0], vec![1, 2, 3]),
        ([2, 1], 24, vec![3, 2, 1, 6, 5, 4, 0, 0], vec![1, 2, 3, 4, 5, 6]),
        ([1, 2], 24, vec![6, 5, 4, 0, 3, 2, 1, 0], vec![1, 2, 3, 4, 5, 6]),
        ([1, 1], 32, vec![3, 2, 1, 0], vec![1, 2, 3]),
        ([2, 1], 32, vec![3, 2, 1, 0, 6, 5, 4, 9], vec![1, 2, 3, 4, 5, 6]),
        ([1, 2], 32, vec![6, 5, 4, 0, 3, 2, 1, 0], vec![1, 2, 3, 4, 5, 6]),
        // A negative height means rows from the top down.
        ([1, -2], 24, vec![3, 2, 1, 0, 6, 5, 4, 0], vec![1, 2, 3, 4, 5, 6]),
        // The padding of the last row may be missing.
        ([1, 1], 24, vec![3, 2, 1], vec![1, 2, 3]),
        // Five bits a channel, from 0 to 31.
        ([2, 1], 16, vec![0x00, 0x7c, 0xff, 0x03], vec![255, 0, 0, 0, 255, 255]),
    ];
    for (size, bits, pixels, expected) in cases {
        assert_eq!(colors(&Bitmap::plain(size, bits, &[], &pixels)), expected, "{size:?} of {bits} bits");
    }
}

#[test]
fn palettes_of_every_depth_are_looked_up() {
    let two = [0, 1, 0, 0, 1, 1];
    for (size, bits, pixels, places) in [
        ([1, 1], 1, vec![0x80, 0, 0, 0], vec![1]),
        // Rows of three pixels take four bytes each.
        ([3, 2], 1, vec![0b0110_0000, 0, 0, 0, 0b0100_0000, 0, 0, 0], two.to_vec()),
        ([3, 2], 2, vec![0b1101_0000, 0, 0, 0, 0b0011_1000, 0, 0, 0], vec![0, 3, 2, 3, 1, 0]),
        ([3, 2], 4, vec![0x32, 0x10, 0, 0, 0x12, 0x30, 0, 0], vec![1, 2, 3, 3, 2, 1]),
        ([2, 1], 8, vec![3, 1, 0, 0], vec![3, 1]),
        ([1, 2], 8, vec![2, 0, 0, 0, 1, 0, 0, 0], vec![1, 2]),
    ] {
        let most = 4.min(1 << bits);
        let bitmap = Bitmap::plain(size, bits, &PALETTE[..most], &pixels);
        assert_eq!(colors(&bitmap), in_palette(&places), "{size:?} of {bits} bits");
    }
    let beyond = Bitmap::plain([1, 1], 8, &PALETTE, &[7, 0, 0, 0]);
    assert!(refused(&beyond.bytes()).contains("a pixel has color 7, and the palette has 4"));
    // Without a palette, eight bits are gray.
    let grey = read(&Bitmap::plain([3, 1], 8, &[], &[5, 6, 7, 0]).bytes());
    assert_eq!((grey.channels(), grey.points()), (1, &[5, 6, 7][..]));
}

#[test]
fn masks_and_run_lengths_are_read() {
    let masks = |masks: &[u32]| masks.iter().flat_map(|mask| mask.to_le_bytes()).collect::<Vec<u8>>();
    // Five, six and five bits.
    let between = masks(&[0xf800, 0x7e0, 0x1f]);
    let bitmap = Bitmap { stored: 3, between, ..Bitmap::plain([2, 1], 16, &[], &[0xe0, 0x07, 0x10, 0x00]) };
    assert_eq!(colors(&bitmap), [0, 255, 0, 0, 0, 132]);
    // Alpha in the lowest byte: half of black on white.
    let between = masks(&[0xff00_0000, 0xff_0000, 0xff00, 0xff]);
    let bitmap = Bitmap { stored: 6, between, ..Bitmap::plain([1, 1], 32, &[], &[51, 0, 0, 0]) };
    assert_eq!(colors(&bitmap), [204; 3]);

    let runs = |bits: u16, pixels: &[u8]| Bitmap {
        stored: if bits == 8 { 1 } else { 2 },
        ..Bitmap::plain([4, 2], bits, &PALETTE, pixels)
    };
    // Two pixels of color 3, then literal 1, 2; end of row; skip one pixel, three of color 1; end.
    let eight = runs(8, &[2, 3, 0, 2, 0, 0, 1, 1, 1, 2, 0, 0, 0, 2, 1, 0, 3, 1, 0, 1]);
    assert_eq!(colors(&eight), in_palette(&[0, 1, 1, 1, 3, 3, 1, 2]));
    // Three pixels alternating 1 and 2, one of 3; then four literal ones.
    let four = runs(4, &[3, 0x12, 1, 0x30, 0, 0, 0, 4, 0x01, 0x23, 0, 1]);
    assert_eq!(colors(&four), in_palette(&[0, 1, 2, 3, 1, 2, 1, 3]));
    assert!(refused(&runs(8, &[5, 1, 0, 1]).bytes()).contains("a run of pixels goes beyond its row"));
    assert!(refused(&runs(8, &[2, 1]).bytes()).contains("it is cut off"));
}

#[test]
fn bitmaps_of_os2_are_read() {
    let mut bytes = b"BM\0\0\0\0\0\0\0\0\x20\0\0\0\x0c\0\0\0\x02\0\x01\0\x01\0\x01\0".to_vec();
    bytes.extend([3, 2, 1, 60, 50, 40, 0b0100_0000, 0, 0, 0]);
    assert_eq!(read(&bytes).points(), [1, 2, 3, 40, 50, 60]);
}

#[test]
fn bitmaps_that_lie_are_refused() {
    let whole = |bits: u16| Bitmap::plain([4, 4], bits, &[], &[9; 64]).bytes();
    for bits in [16, 24, 32] {
        let bytes = whole(bits);
        let row = 4 * usize::from(bits) / 8;
        assert!(refused(&bytes[..54 + 4 * row - 1]).contains("it is cut off"), "{bits}");
    }
    let changed = |at: usize, to: u8| {
        let mut bytes = whole(24);
        bytes[at] = to;
        refused(&bytes)
    };
    assert!(changed(14, 41).contains("its header has 41 bytes"));
    assert!(changed(28, 5).contains("pixels of 5 bits"));
    assert!(changed(30, 4).contains("stored in way 4"), "{}", changed(30, 4));
    assert!(changed(13, 1).contains("its pixels start at byte"));
    assert!(changed(21, 0x7f).contains("at most 16384 each way"));
    assert!(changed(18, 0).contains("nothing in it"));
}
