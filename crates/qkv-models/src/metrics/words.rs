//! Tokenization for BLEU: sacrebleu's tokenizers, rule by rule, including the mistakes that they keep so that scores
//! stay comparable.

use super::is_space;
use regex::Regex;
use serde::{Deserialize, Serialize};
use std::sync::LazyLock;

/// A tokenizer of sacrebleu.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Words {
    /// `13a`, the `mteval-v13a` of WMT: the default for European languages.
    #[default]
    #[serde(rename = "13a")]
    V13a,
    /// `zh`: every Chinese character is a word, the rest as in `13a`.
    #[serde(rename = "zh")]
    Chinese,
    /// `intl`, the `mteval-v14` of WMT: every Unicode punctuation mark and symbol is a word.
    #[serde(rename = "intl")]
    International,
    /// `char`: every character is a word.
    #[serde(rename = "char")]
    Characters,
    /// `none`: words are separated by spaces already.
    #[serde(rename = "none")]
    Spaces,
}

/// Rules in order: a pattern and its replacement.
type Rules = Vec<(Regex, &'static str)>;

fn rules<const N: usize>(rules: [(&str, &'static str); N]) -> Rules {
    rules.into_iter().map(|(pattern, by)| (Regex::new(pattern).expect("a constant pattern"), by)).collect()
}

static WESTERN: LazyLock<Rules> = LazyLock::new(|| {
    rules([
        (r"([\{-~\[-` -\&\(-\+:-@/])", " $1 "),
        // A full stop or comma is a word unless it stands between digits.
        (r"([^0-9])([.,])", "$1 $2 "),
        (r"([.,])([^0-9])", " $1 $2"),
        (r"([0-9])(-)", "$1 $2 "),
    ])
});

static INTERNATIONAL: LazyLock<Rules> =
    LazyLock::new(|| rules([(r"(\P{N})(\p{P})", "$1 $2 "), (r"(\p{P})(\P{N})", " $1 $2"), (r"(\p{S})", " $1 ")]));

fn apply(rules: &Rules, line: &str) -> String {
    rules.iter().fold(line.to_owned(), |line, (pattern, by)| pattern.replace_all(&line, *by).into_owned())
}

/// What `zh` treats as Chinese. Two of its ranges were meant to lie beyond U+FFFF but do not: they cover symbols from
/// U+2001 on, quotation marks and arrows among them.
fn is_chinese(c: char) -> bool {
    matches!(c, '\u{3400}'..='\u{4db5}' | '\u{4e00}'..='\u{9fbb}' | '\u{f900}'..='\u{fa2d}' | '\u{fa30}'..='\u{fa6a}'
        | '\u{fa70}'..='\u{fad9}' | '\u{2001}'..='\u{2a6d}' | '\u{2f81}'..='\u{2fa1}' | '\u{ff00}'..='\u{ffef}'
        | '\u{2e80}'..='\u{2eff}' | '\u{3000}'..='\u{303f}' | '\u{31c0}'..='\u{31ef}' | '\u{2f00}'..='\u{2fdf}'
        | '\u{2ff0}'..='\u{2fff}' | '\u{3100}'..='\u{312f}' | '\u{31a0}'..='\u{31bf}' | '\u{fe10}'..='\u{fe1f}'
        | '\u{fe30}'..='\u{fe4f}' | '\u{3200}'..='\u{33ff}')
}

impl Words {
    /// The name in sacrebleu.
    pub fn name(self) -> &'static str {
        match self {
            Words::V13a => "13a",
            Words::Chinese => "zh",
            Words::International => "intl",
            Words::Characters => "char",
            Words::Spaces => "none",
        }
    }

    /// The words of a line, separated by single spaces.
    ///
    /// ```
    /// use qkv_models::metrics::words::Words;
    ///
    /// assert_eq!(Words::V13a.cut("It's 3.5 kg, isn't it?"), "It's 3.5 kg , isn't it ?");
    /// assert_eq!(Words::Chinese.cut("我有iPhone。"), "我 有 iPhone 。");
    /// ```
    pub fn cut(self, line: &str) -> String {
        let line = line.trim_end_matches(is_space);
        let cut = match self {
            Words::V13a => {
                let mut line = line.replace("<skipped>", "").replace("-\n", "").replace('\n', " ");
                for (entity, sign) in [("&quot;", "\""), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")] {
                    line = line.replace(entity, sign);
                }
                apply(&WESTERN, &format!(" {line} "))
            }
            Words::Chinese => {
                let mut apart = String::with_capacity(line.len() * 2);
                for c in line.trim_start_matches(is_space).chars() {
                    let space = if is_chinese(c) { " " } else { "" };
                    apart.extend([space, c.encode_utf8(&mut [0; 4]), space]);
                }
                apply(&WESTERN, &apart)
            }
            Words::International => apply(&INTERNATIONAL, line),
            Words::Characters => line.chars().flat_map(|c| [c, ' ']).collect(),
            Words::Spaces => line.to_owned(),
        };
        let words: Vec<&str> = cut.split(is_space).filter(|word| !word.is_empty()).collect();
        words.join(" ")
    }
}
