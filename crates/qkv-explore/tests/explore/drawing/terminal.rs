//! Pictures in a terminal.

use super::example::{hostile, kept, large, small};
use qkv_explore::draw::{Colors, Palette, Picture, Scale};
use unicode_width::UnicodeWidthStr;

/// A drawing without its color sequences.
fn plain(drawing: &str) -> String {
    let mut parts = drawing.split("\x1b[");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.split_once('m').expect("every escape is a color").1)
}

#[test]
fn a_small_picture_is_drawn_as_it_was() {
    kept("small.txt", &Picture::from(small()).terminal(80, Colors::None));
    kept("small-few.txt", &Picture::from(small()).terminal(80, Colors::Few));
    kept("small-cube.txt", &Picture::from(small()).terminal(80, Colors::Cube));
    let all = Picture { palette: Palette::Ember, scale: Scale::Log, ..Picture::from(small()) };
    kept("small-all.txt", &all.terminal(80, Colors::All));
    kept("small-rank.txt", &Picture { scale: Scale::Rank, ..Picture::from(small()) }.terminal(80, Colors::None));
}

#[test]
fn a_large_picture_becomes_a_map_that_says_so() {
    let drawn = Picture::from(large(300, 500)).terminal(80, Colors::None);
    kept("large.txt", &drawn);
    assert!(drawn.contains("300 × 500, each cell is the largest of 8 × 7 weights"), "{drawn}");
    let colored = Picture::from(large(300, 500)).terminal(80, Colors::All);
    assert!(colored.contains("each cell is the largest of 4 × 7 weights"), "half a line a row: {colored}");
}

#[test]
fn no_line_is_wider_than_the_terminal() {
    for width in [60, 80, 200] {
        for matrix in [small(), large(20, 30), large(100, 100), large(5, 1000), hostile()] {
            for colors in [Colors::None, Colors::Few, Colors::Cube, Colors::All] {
                let drawn = plain(&Picture::from(matrix.clone()).terminal(width, colors));
                let legend = drawn.lines().last().unwrap().width();
                for line in drawn.lines() {
                    assert!(line.width() <= width.max(legend), "{width}: {line}");
                }
            }
        }
    }
}

#[test]
fn hostile_labels_move_no_cursor() {
    for colors in [Colors::None, Colors::All] {
        let drawn = plain(&Picture::from(hostile()).terminal(100, colors));
        assert!(drawn.chars().all(|c| c == '\n' || !c.is_control()), "{drawn:?}");
        assert!(!drawn.contains(['\u{202e}', '\u{2028}']));
    }
}

#[test]
fn few_colors_change_nothing_but_colors() {
    let picture = Picture::from(small());
    assert_eq!(plain(&picture.terminal(80, Colors::Few)), picture.terminal(80, Colors::None));
}

#[test]
fn nothing_is_drawn_of_nothing() {
    assert_eq!(Picture::from(large(0, 0)).terminal(80, Colors::All), "");
}
