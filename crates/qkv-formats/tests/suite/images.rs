//! Images of every kind that the formats have, and malformed files.

use png::{BitDepth, ColorType, Encoder};
use qkv_formats::image::Image;
use std::path::Path;

const GREY: &[u8] = include_bytes!("../images/grey.jpg");
const COLOUR: &[u8] = include_bytes!("../images/colour.jpg");
const PROGRESSIVE: &[u8] = include_bytes!("../images/progressive.jpg");
const SIDEWAYS: &[u8] = include_bytes!("../images/sideways.jpg");
const LOSSY: &[u8] = include_bytes!("../images/lossy.webp");
const LOSSLESS: &[u8] = include_bytes!("../images/lossless.webp");
const CMYK: &[u8] = include_bytes!("../images/cmyk.jpg");

fn png(width: u32, height: u32, colour: ColorType, depth: BitDepth, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = Encoder::new(&mut bytes, width, height);
    encoder.set_color(colour);
    encoder.set_depth(depth);
    if colour == ColorType::Indexed {
        encoder.set_palette([10u8, 20, 30, 200, 210, 220].to_vec());
        encoder.set_trns([255u8, 0].to_vec());
    }
    encoder.write_header().unwrap().write_image_data(data).unwrap();
    bytes
}

fn read(bytes: &[u8]) -> Image {
    Image::from_bytes(bytes, "a.img").unwrap()
}

fn refused(bytes: &[u8]) -> String {
    Image::from_bytes(bytes, "a.img").expect_err("it is broken").to_string()
}

#[test]
fn every_kind_of_png_becomes_grey_or_colour() {
    use BitDepth::{Eight, One, Sixteen};
    let grey = read(&png(2, 1, ColorType::Grayscale, Eight, &[7, 250]));
    assert_eq!((grey.channels(), grey.points()), (1, &[7, 250][..]));
    assert_eq!(read(&png(8, 1, ColorType::Grayscale, One, &[0b1010_0000])).points()[..3], [255, 0, 255]);
    assert_eq!(read(&png(1, 1, ColorType::Rgb, Eight, &[1, 2, 3])).points(), [1, 2, 3]);
    assert_eq!(read(&png(1, 1, ColorType::Rgb, Sixteen, &[1, 99, 2, 99, 3, 99])).points(), [1, 2, 3]);
    // Transparent pixels are blended with white.
    assert_eq!(read(&png(1, 1, ColorType::GrayscaleAlpha, Eight, &[0, 51])).points(), [204]);
    assert_eq!(read(&png(1, 1, ColorType::Rgba, Eight, &[9, 9, 9, 0])).points(), [255; 3]);
    let indexed = read(&png(2, 1, ColorType::Indexed, Eight, &[0, 1]));
    assert_eq!((indexed.channels(), indexed.points()), (3, &[10, 20, 30, 255, 255, 255][..]));
}

#[test]
fn every_kind_of_jpeg_becomes_grey_or_colour() {
    let near = |found: &[u8], expected: [u8; 3]| {
        assert!(found.iter().zip(expected).all(|(x, y)| x.abs_diff(y) < 16), "{found:?} for {expected:?}");
    };
    let grey = read(GREY);
    assert_eq!((grey.width(), grey.height(), grey.channels()), (16, 8, 1));
    assert!(grey.points()[2].abs_diff(30) < 12 && grey.points()[13].abs_diff(220) < 12, "{:?}", grey.points());
    for bytes in [COLOUR, PROGRESSIVE, CMYK] {
        let image = read(bytes);
        assert_eq!((image.width(), image.height(), image.channels()), (16, 8, 3));
        near(&image.points()[3 * 2..][..3], [30, 15, 225]);
        near(&image.points()[3 * 13..][..3], [220, 110, 35]);
    }
}

/// A BMP of 24 bits: rows from the bottom up, blue first, each padded to four bytes.
fn bmp(width: u32, height: u32, pixels: &[[u8; 3]]) -> Vec<u8> {
    let mut rows = Vec::new();
    for row in pixels.chunks_exact(width as usize).rev() {
        row.iter().for_each(|[r, g, b]| rows.extend([b, g, r]));
        rows.resize(rows.len().next_multiple_of(4), 0);
    }
    let mut bytes = b"BM".to_vec();
    for number in [54 + rows.len() as u32, 0, 54, 40, width, height, 24 << 16 | 1, 0, rows.len() as u32, 0, 0, 0, 0] {
        bytes.extend(number.to_le_bytes());
    }
    [bytes, rows].concat()
}

#[test]
fn webp_and_bmp_become_colour() {
    for bytes in [LOSSY, LOSSLESS] {
        let image = read(bytes);
        assert_eq!((image.width(), image.height(), image.channels()), (16, 8, 3));
        let near = |at: usize, expected: [u8; 3]| {
            assert!(image.points()[3 * at..][..3].iter().zip(expected).all(|(x, y)| x.abs_diff(y) < 16), "{at}");
        };
        near(2, [30, 15, 225]);
        near(13, [220, 110, 35]);
    }
    let image = read(&bmp(3, 2, &[[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12], [13, 14, 15], [16, 17, 18]]));
    assert_eq!((image.width(), image.height(), image.channels()), (3, 2, 3));
    assert_eq!(image.points(), (1..=18).collect::<Vec<u8>>());
}

#[test]
fn a_photograph_is_turned_as_its_camera_was() {
    let image = read(SIDEWAYS);
    // Stored as 16 × 8 with blue on the left; the orientation turns the left side up.
    assert_eq!((image.width(), image.height()), (8, 16));
    assert!(image.points()[2] > 200 && image.points()[3 * (15 * 8 + 4)] > 200);
}

#[test]
fn files_that_are_cut_off_or_no_images_are_refused() {
    let whole = png(16, 16, ColorType::Rgb, BitDepth::Eight, &[77; 16 * 16 * 3]);
    for bytes in [&whole[..], GREY, COLOUR, PROGRESSIVE, CMYK, LOSSY, LOSSLESS, &bmp(4, 4, &[[9; 3]; 16])] {
        for keep in [3, 10, bytes.len() / 2, bytes.len() - 20] {
            assert!(refused(&bytes[..keep]).starts_with("`a.img`: image: "), "{keep} of {}", bytes.len());
        }
    }
    assert!(refused(b"").contains("the file is empty"));
    assert!(refused(b"GIF89a\x01\x00").contains("none of PNG, JPEG, WebP and BMP"));
    assert!(Image::open(Path::new("no/such.png")).unwrap_err().to_string().contains("cannot open"));
}

#[test]
fn sizes_that_nobody_has_memory_for_are_refused_before_it_is_asked_for() {
    // A header that claims 100,000 × 100,000 points, with a valid checksum.
    let claims = |width: u32, height: u32| {
        let mut bytes = png(1, 1, ColorType::Rgb, BitDepth::Eight, &[0; 3]);
        bytes[16..20].copy_from_slice(&width.to_be_bytes());
        bytes[20..24].copy_from_slice(&height.to_be_bytes());
        let crc = crc(&bytes[12..29]);
        bytes[29..33].copy_from_slice(&crc.to_be_bytes());
        bytes
    };
    assert!(refused(&claims(100_000, 100_000)).contains("at most 16384 each way"));
    assert!(refused(&claims(16_000, 16_000)).contains("points are taken"));
    assert!(refused(&claims(0, 5)).contains("image"));
    // The height and width of a JPEG follow its SOF marker.
    let mut bytes = COLOUR.to_vec();
    let at = bytes.windows(2).position(|two| two == [0xff, 0xc0]).unwrap();
    bytes[at + 5..at + 9].copy_from_slice(&[0xff; 4]);
    assert!(refused(&bytes).contains("image"), "{}", refused(&bytes));
}

#[test]
fn bytes_that_flip_never_panic() {
    let whole = png(16, 16, ColorType::Rgba, BitDepth::Eight, &[99; 16 * 16 * 4]);
    for bytes in [&whole[..], GREY, COLOUR, PROGRESSIVE, CMYK, LOSSY, LOSSLESS, SIDEWAYS, &bmp(4, 4, &[[9; 3]; 16])] {
        for at in 0..bytes.len() {
            for flip in [0x01, 0xff] {
                let mut bytes = bytes.to_vec();
                bytes[at] ^= flip;
                if let Ok(image) = Image::from_bytes(&bytes, "a.img") {
                    assert_eq!(image.points().len(), image.width() * image.height() * image.channels());
                }
            }
        }
    }
}

/// The checksum of PNG chunks.
fn crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 })
    })
}
