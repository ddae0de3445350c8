//! A document in a terminal, shaded by attention: the weight of each sentence beside it, and its words by their weight
//! within the sentence. Shades show the excess over a uniform weight, so that spread-out attention looks flat. As in
//! Yang et al. 2016 the excess of a word is multiplied by `√s` of its sentence, so that strong words of strong
//! sentences stand out. With color, words have a background; without, block characters are drawn on a line below.

use super::alignment::{PLAIN, push_line, shade};
use super::letters::sanitized;
use super::palette::{Palette, Theme};
use super::scale::Scale;
use super::terminal::Colors;
use qkv_models::{ReadSentence, Reading};
use unicode_width::UnicodeWidthStr;

/// Columns of a sentence weight and the space after it.
const MARGIN: usize = 9;
/// Levels below this have no background.
const PAINTED: f32 = 0.02;

/// Draws a document for a terminal of `width` columns.
///
/// ```
/// use qkv_explore::draw::{Colors, document};
/// use qkv_models::{ReadSentence, ReadWord, Reading};
/// let word = |text: &str, weight| ReadWord { text: text.into(), weight };
/// let read = Reading {
///     probabilities: vec![0.1, 0.9],
///     sentences: vec![
///         ReadSentence { text: "A film.".into(), weight: 0.2, words: vec![word("A", 0.3), word("film.", 0.7)] },
///         ReadSentence { text: "So good!".into(), weight: 0.8, words: vec![word("So", 0.1), word("good!", 0.9)] },
///     ],
///     left_out: 0,
/// };
/// assert_eq!(document(&read, 80, Colors::None), "
///    0.200 A film.
///            ▒▒▒▒▒
/// ██ 0.800 So good!
///             █████
/// ".trim_start_matches('\n'));
/// ```
pub fn document(read: &Reading, width: usize, colors: Colors) -> String {
    let (strong_words, strong_sentences) = strengths(read);
    let of_words = Scale::Linear.over(strong_words.iter().flatten().copied());
    let of_sentences = Scale::Linear.over(strong_sentences.iter().copied());
    let room = width.saturating_sub(MARGIN).max(16);
    let mut drawing = String::new();
    for (at, sentence) in read.sentences.iter().enumerate() {
        let place = of_sentences.place(strong_sentences[at]);
        let painted = paint(place, colors);
        let mark = match &painted {
            Some(before) => format!("{before}  {PLAIN}"),
            None if colored(colors) => "  ".into(),
            None => shade(place).to_string().repeat(2),
        };
        let mut margin = format!("{mark} {:.3} ", sentence.weight);
        let mut line = Line::default();
        for (word, &strength) in sentence.words.iter().zip(&strong_words[at]) {
            let text = sanitized(&word.text);
            if line.columns > 0 && line.columns + 1 + text.width() > room {
                line.write(&mut drawing, &margin, colors);
                (line, margin) = (Line::default(), " ".repeat(MARGIN));
            }
            line.push(&text, of_words.place(strength), colors);
        }
        line.write(&mut drawing, &margin, colors);
    }
    if read.left_out > 0 {
        push_line(&mut drawing, &format!("{}{} more sentences were not read", " ".repeat(MARGIN), read.left_out));
    }
    drawing
}

/// The excess over uniform weights, of words by sentence and of sentences.
pub(super) fn strengths(read: &Reading) -> (Vec<Vec<f32>>, Vec<f32>) {
    let above = |share: f32, of: usize| (share - 1.0 / of.max(1) as f32).max(0.0);
    let words = |sentence: &ReadSentence| {
        let (root, count) = (sentence.weight.max(0.0).sqrt(), sentence.words.len());
        sentence.words.iter().map(|word| root * above(word.weight, count)).collect()
    };
    let count = read.sentences.len();
    let sentences = read.sentences.iter().map(|sentence| above(sentence.weight, count)).collect();
    (read.sentences.iter().map(words).collect(), sentences)
}

fn colored(colors: Colors) -> bool {
    matches!(colors, Colors::Cube | Colors::All)
}

/// ANSI background for a level; `None` without color or below the threshold.
pub(super) fn paint(place: f32, colors: Colors) -> Option<String> {
    colors.behind(Palette::Sea.color(place, Theme::Dark)).filter(|_| place >= PAINTED)
}

/// A line of words, and the line of shades below it.
#[derive(Default)]
struct Line {
    words: String,
    shades: String,
    columns: usize,
}

impl Line {
    fn push(&mut self, text: &str, place: f32, colors: Colors) {
        if self.columns > 0 {
            self.words.push(' ');
            self.shades.push(' ');
            self.columns += 1;
        }
        match paint(place, colors) {
            Some(before) => {
                // Light text on dark backgrounds, dark text on light ones.
                let ink = if place > 0.6 { [16, 18, 24] } else { [244, 246, 250] };
                let ink = colors.before(ink).unwrap_or_default();
                self.words += &format!("{before}{ink}{text}{PLAIN}");
            }
            None => self.words += text,
        }
        self.shades.extend(std::iter::repeat_n(shade(place), text.width()));
        self.columns += text.width();
    }

    fn write(&self, drawing: &mut String, margin: &str, colors: Colors) {
        push_line(drawing, &format!("{margin}{}", self.words));
        if !colored(colors) && !self.shades.trim().is_empty() {
            push_line(drawing, &format!("{}{}", " ".repeat(MARGIN), self.shades));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qkv_models::ReadWord;

    fn read() -> Reading {
        let words: Vec<ReadWord> = (0..12)
            .map(|at| ReadWord { text: format!("word{at}"), weight: if at == 7 { 0.9 } else { 0.01 } })
            .collect();
        let text = "…".into();
        Reading { probabilities: vec![1.0], sentences: vec![ReadSentence { text, weight: 1.0, words }], left_out: 3 }
    }

    #[test]
    fn long_sentences_wrap_and_shades_stay_under_their_words() {
        let drawn = document(&read(), 40, Colors::None);
        let lines: Vec<&str> = drawn.lines().collect();
        assert_eq!(lines[0], "   1.000 word0 word1 word2 word3 word4");
        let at = lines.iter().position(|line| line.contains("word7")).unwrap();
        assert_eq!(lines[at + 1].find('█'), lines[at].find("word7"));
        assert!(drawn.ends_with("3 more sentences were not read\n"), "{drawn}");
    }

    #[test]
    fn colors_are_backgrounds_and_a_word_cannot_move_the_cursor() {
        let mut read = read();
        read.sentences[0].words[7].text = "a\x1b[2Jb".into();
        let drawn = document(&read, 40, Colors::All);
        assert!(drawn.contains("\x1b[48;2;") && !drawn.contains("[2J\x1b") && !drawn.contains("\x1b[2J"), "{drawn:?}");
        assert!(!drawn.contains('█'));
    }
}
