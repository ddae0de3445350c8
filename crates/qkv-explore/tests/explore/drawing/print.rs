//! Pictures for print: SVG and PNG show the same, and the colors are those of the weights.

use super::example::{hostile, kept, large, small};
use qkv_explore::Matrix;
use qkv_explore::draw::{Fonts, Palette, Picture, Scale, Scaled, Theme};

fn titled(matrix: Matrix) -> Picture {
    Picture { title: Some("cross.1 · mean of 4 heads".into()), ..Picture::from(matrix) }
}

#[test]
fn an_svg_has_the_same_bytes_as_ever() {
    kept("small.svg", &titled(small()).svg().unwrap());
    let dark = Picture { theme: Theme::Dark, palette: Palette::Ember, scale: Scale::Log, ..titled(small()) };
    kept("small-dark.svg", &dark.svg().unwrap());
    let turned = Matrix {
        rows: small().columns,
        columns: small().rows,
        weights: (0..4).map(|j| small().weights.iter().map(|row| row[j]).collect()).collect(),
    };
    kept("turned.svg", &Picture { scale: Scale::Rank, ..titled(turned) }.svg().unwrap());
}

#[test]
fn hostile_labels_stay_text() {
    let svg = Picture { title: Some("<script>".into()), ..Picture::from(hostile()) }.svg().unwrap();
    assert!(!svg.contains("<script") && svg.contains("&lt;/text&gt;&lt;scr"), "{svg}");
    for mark in ["href", "url(", "<image", "<style", "<!", "<?", " on"] {
        assert!(!svg.contains(mark), "{mark}");
    }
    // XML allows no other control characters, and no non-characters.
    let allowed = |c: char| c == '\n' || (!c.is_control() && c != '\u{fffe}' && c != '\u{ffff}');
    assert!(svg.chars().all(allowed));
    assert!(svg.contains('…') && svg.len() < 60_000, "long labels are cut: {} bytes", svg.len());
    Picture::from(hostile()).png(1.0, &Fonts::none()).unwrap();
}

/// Colors of a PNG: width, height, and red, green and blue of each point.
fn decoded(bytes: &[u8]) -> (usize, usize, Vec<u8>) {
    let mut reader = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().unwrap();
    let mut points = vec![0; reader.output_buffer_size().unwrap()];
    let frame = reader.next_frame(&mut points).unwrap();
    assert_eq!(frame.color_type, png::ColorType::Rgb);
    (frame.width as usize, frame.height as usize, points)
}

/// The numbers behind a word of an SVG: `translate(` gives where the cells begin.
fn numbers(svg: &str, behind: &str) -> Vec<f64> {
    let rest = &svg[svg.find(behind).unwrap() + behind.len()..];
    let ended = rest.find([')', '>']).unwrap();
    rest[..ended].split(|c: char| !c.is_ascii_digit() && c != '.').filter_map(|word| word.parse().ok()).collect()
}

#[test]
fn a_png_is_the_svg_magnified_and_each_cell_has_the_color_of_its_weight() {
    for (matrix, cell) in [(small(), 30.0), (large(40, 25), 16.0), (large(90, 120), 5.0)] {
        for (theme, scale, magnified) in [(Theme::Light, Scale::Linear, 2.0), (Theme::Dark, Scale::Log, 1.5)] {
            let picture = Picture { theme, scale, ..titled(matrix.clone()) };
            let svg = picture.svg().unwrap();
            let (size, start) = (numbers(&svg, "viewBox=\"0 0"), numbers(&svg, "translate("));
            let png = picture.png(magnified, &Fonts::none()).unwrap();
            let (width, height, points) = decoded(&png.bytes);
            assert_eq!(
                [width, height].map(|side| side as f64),
                [size[0], size[1]].map(|side| (side * magnified).round())
            );
            let (scaled, colors) = (Scaled::of(&matrix, scale), picture.palette.colors(theme));
            for (i, row) in matrix.weights.iter().enumerate() {
                for (j, &weight) in row.iter().enumerate() {
                    let [x, y] = [(start[0], j), (start[1], i)].map(|(start, at)| start + cell * (at as f64 + 0.45));
                    let at = 3 * ((y * magnified) as usize * width + (x * magnified) as usize);
                    let expected = colors[(255.0 * scaled.place(weight)).round() as usize];
                    assert_eq!(points[at..at + 3], expected, "row {i}, column {j}");
                }
            }
        }
    }
}

#[test]
fn what_no_font_has_is_a_box_and_is_told() {
    let none = titled(small()).png(2.0, &Fonts::none()).unwrap();
    assert_eq!(none.missing, ['不', '久', '好', '见']);
    assert_eq!(titled(small()).png(2.0, &Fonts::none()).unwrap(), none, "the same bytes again");
    let ascii = titled(large(3, 3)).png(2.0, &Fonts::none()).unwrap();
    assert_eq!(ascii.missing, []);
    let unlabelled = Picture::from(Matrix { rows: vec![String::new(); 3], ..large(3, 3) });
    let (_, _, points) = decoded(&unlabelled.png(2.0, &Fonts::none()).unwrap().bytes);
    let ink = |points: &[u8]| points.chunks_exact(3).filter(|point| *point == Theme::Light.ink()).count();
    assert!(ink(&decoded(&ascii.bytes).2) > ink(&points) + 100, "letters are drawn");
}

#[test]
fn files_that_are_no_fonts_are_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a.ttf"), b"\0\x01\0\0\0\x09 no font at all").unwrap();
    let fonts = Fonts::in_folder(folder.path());
    assert!(fonts.is_empty());
    assert_eq!(titled(small()).png(1.0, &fonts).unwrap(), titled(small()).png(1.0, &Fonts::none()).unwrap());
    assert!(Fonts::in_folder(folder.path().join("none")).is_empty());
}

#[test]
fn a_font_of_this_machine_is_used_where_there_is_one() {
    let fonts = Fonts::of_system();
    if !fonts.is_empty() {
        let (with, without) = (titled(small()).png(2.0, &fonts), titled(small()).png(2.0, &Fonts::none()));
        let (with, without) = (with.unwrap(), without.unwrap());
        assert!(with.bytes != without.bytes && with.missing.len() <= without.missing.len());
    }
}

#[test]
fn a_large_picture_is_pooled_and_says_so() {
    let svg = titled(large(700, 500)).svg().unwrap();
    assert!(svg.contains("each cell is the largest of 3 × 2 weights"));
    assert!(svg.len() < 1_000_000, "{} bytes", svg.len());
}

#[test]
fn what_cannot_be_drawn_is_refused() {
    for magnified in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e9, 1e-9] {
        let refused = titled(small()).png(magnified, &Fonts::none()).unwrap_err();
        assert!(refused.to_string().contains("is too large"), "{refused}");
    }
    assert!(titled(large(0, 3)).svg().is_err());
    let mut ragged = small();
    ragged.weights[2].pop();
    assert!(titled(ragged.clone()).svg().is_err() && titled(ragged).png(1.0, &Fonts::none()).is_err());
}
