//! PNG, JPEG, WebP and BMP decoding. Everything becomes 8-bit gray or RGB: palettes are expanded, 16 bits are truncated
//! to 8, transparency is blended onto white, CMYK is converted, and photographs are turned upright.

use super::bmp::{self, Pixels};
use super::{Image, MOST_POINTS, orientation};
use image_webp::WebPDecoder;
use png::{BitDepth, ColorType, Decoder, Limits, Transformations};
use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};
use zune_jpeg::JpegDecoder;
use zune_jpeg::errors::DecodeErrors;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

/// Memory that a decoder may use besides the image itself, in bytes.
const WORKING: usize = 64 << 20;
/// The largest number of scans of a progressive JPEG: each is a pass over the whole image.
const SCANS: usize = 100;

const PNG: &[u8] = b"\x89PNG\r\n\x1a\n";
const JPEG: &[u8] = b"\xff\xd8\xff";

/// Decodes an image; the error says what is wrong with the bytes.
pub(super) fn decode(bytes: &[u8]) -> Result<Image, String> {
    // The decoders are fuzzed upstream; any remaining panic becomes an error.
    let decoded = catch_unwind(AssertUnwindSafe(|| match bytes {
        [] => Err("the file is empty".into()),
        _ if bytes.starts_with(PNG) => png(bytes),
        _ if bytes.starts_with(JPEG) => jpeg(bytes),
        _ if bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP") => webp(bytes),
        _ if bytes.starts_with(b"BM") => bmp(bytes),
        _ => Err("it is none of PNG, JPEG, WebP and BMP".into()),
    }));
    decoded.unwrap_or_else(|_| Err("it cannot be decoded".into()))
}

fn png(bytes: &[u8]) -> Result<Image, String> {
    let wrong = |error: png::DecodingError| format!("the PNG is broken: {error}");
    let mut decoder = Decoder::new_with_limits(Cursor::new(bytes), Limits { bytes: WORKING + 4 * MOST_POINTS });
    decoder.set_transformations(Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().map_err(wrong)?;
    let (width, height) = (reader.info().width as usize, reader.info().height as usize);
    Image::fits(width, height)?;
    // The decoder assumes a palette of whole colors, at most 256 of them.
    let colors = reader.info().palette.as_ref().map_or(0, |palette| palette.len());
    if !colors.is_multiple_of(3) || colors > 3 * 256 {
        return Err(format!("the PNG is broken: its palette has {colors} bytes"));
    }
    let size = reader.output_buffer_size().ok_or("it is too large")?;
    let mut points = vec![0; size];
    let info = reader.next_frame(&mut points).map_err(wrong)?;
    if (info.width as usize, info.height as usize, info.bit_depth) != (width, height, BitDepth::Eight) {
        return Err("its first picture is not as large as it says".into());
    }
    points.truncate(info.buffer_size());
    let (channels, points) = match info.color_type {
        ColorType::Grayscale => (1, points),
        ColorType::Rgb => (3, points),
        ColorType::GrayscaleAlpha => (1, on_white(&points, 1)),
        ColorType::Rgba => (3, on_white(&points, 3)),
        ColorType::Indexed => return Err("its palette was not looked up".into()),
    };
    let turned = reader.info().exif_metadata.as_deref().map_or(1, orientation::of_exif);
    let image = Image::new(width, height, channels, points).map_err(|error| error.to_string())?;
    Ok(image.upright(turned))
}

/// Blends pixels onto white, by the alpha channel after their color channels.
fn on_white(points: &[u8], channels: usize) -> Vec<u8> {
    let mut blended = Vec::with_capacity(points.len() / (channels + 1) * channels);
    for point in points.chunks_exact(channels + 1) {
        let alpha = u32::from(point[channels]);
        let mix = |&c: &u8| ((u32::from(c) * alpha + 255 * (255 - alpha) + 127) / 255) as u8;
        blended.extend(point[..channels].iter().map(mix));
    }
    blended
}

fn webp(bytes: &[u8]) -> Result<Image, String> {
    let wrong = |error: image_webp::DecodingError| format!("the WebP is broken: {error}");
    let mut decoder = WebPDecoder::new(Cursor::new(bytes)).map_err(wrong)?;
    let (width, height) = decoder.dimensions();
    Image::fits(width as usize, height as usize)?;
    decoder.set_memory_limit(WORKING + 4 * MOST_POINTS);
    let turned = decoder.exif_metadata().ok().flatten().map_or(1, |exif| orientation::of_exif(&exif));
    let mut points = vec![0; decoder.output_buffer_size().ok_or("it is too large")?];
    decoder.read_image(&mut points).map_err(wrong)?;
    let points = if decoder.has_alpha() { on_white(&points, 3) } else { points };
    let image = Image::new(width as usize, height as usize, 3, points).map_err(|error| error.to_string())?;
    Ok(image.upright(turned))
}

fn bmp(bytes: &[u8]) -> Result<Image, String> {
    let Pixels { width, height, channels, points } =
        bmp::decode(bytes).map_err(|what| format!("the BMP is broken: {what}"))?;
    let (channels, points) = if channels == 4 { (3, on_white(&points, 3)) } else { (channels, points) };
    Image::new(width, height, channels, points).map_err(|error| error.to_string())
}

fn jpeg(bytes: &[u8]) -> Result<Image, String> {
    let wrong = |error: DecodeErrors| match error {
        // The decoder's own message only says how many bytes it expected.
        DecodeErrors::IoErrors(_) | DecodeErrors::ExhaustedData => "the JPEG is broken: it is cut off".to_owned(),
        error => format!("the JPEG is broken: {}", format!("{error:?}").trim_matches(['"', '\n'])),
    };
    // The decoder's own size limits are lifted: `fits` checks the size in the header.
    let options = |colors| {
        DecoderOptions::default()
            .set_max_width(usize::from(u16::MAX))
            .set_max_height(usize::from(u16::MAX))
            .set_strict_mode(true)
            .jpeg_set_max_scans(SCANS)
            .jpeg_set_out_colorspace(colors)
    };
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options(ColorSpace::RGB));
    decoder.decode_headers().map_err(wrong)?;
    let info = decoder.info().ok_or("it has no header")?;
    let (width, height) = (usize::from(info.width), usize::from(info.height));
    Image::fits(width, height)?;
    let (channels, colors) = match info.components {
        1 => (1, ColorSpace::Luma),
        _ => (3, ColorSpace::RGB),
    };
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options(colors));
    let points = decoder.decode().map_err(wrong)?;
    // A truncated file has no end marker; its missing rows would be gray.
    if !bytes.windows(2).any(|two| two == [0xff, 0xd9]) {
        return Err("the JPEG is broken: it is cut off".into());
    }
    let turned = decoder.exif().map_or(1, |exif| orientation::of_exif(exif));
    let image = Image::new(width, height, channels, points).map_err(|error| error.to_string())?;
    Ok(image.upright(turned))
}
