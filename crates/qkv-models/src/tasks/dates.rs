//! Dates from 1900 to 2099 as people write them in English and Chinese, and in ISO form. Ambiguous forms are not
//! generated: no numeric day before the month, no two-digit years.

use crate::draws::Draws;
use crate::text::corpus::Pair;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
const ONES: [&str; 20] = [
    "",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
];
const TENS: [&str; 10] = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"];
const ORDINALS: [&str; 20] = [
    "",
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
    "thirteenth",
    "fourteenth",
    "fifteenth",
    "sixteenth",
    "seventeenth",
    "eighteenth",
    "nineteenth",
];
const HAN: [char; 10] = ['〇', '一', '二', '三', '四', '五', '六', '七', '八', '九'];
const HAN_WEEKDAYS: [char; 7] = ['一', '二', '三', '四', '五', '六', '日'];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Date {
    year: usize,
    /// 1 to 12.
    month: usize,
    /// From 1.
    day: usize,
}

/// A date in some form, and in ISO form.
pub(super) fn pair(draws: &mut Draws) -> Pair {
    let year = 1900 + draws.below(200);
    let month = 1 + draws.below(12);
    let date = Date { year, month, day: 1 + draws.below(days(year, month)) };
    let source = if draws.below(2) == 0 { date.english(draws) } else { date.chinese(draws) };
    Pair::new(source, format!("{year:04}-{month:02}-{:02}", date.day))
}

fn is_leap(year: usize) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn days(year: usize, month: usize) -> usize {
    match month {
        2 => 28 + usize::from(is_leap(year)),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// `fifteen`, `thirty-one`: below a hundred.
fn words(number: usize) -> String {
    match (number / 10, number % 10) {
        (0 | 1, _) => ONES[number].to_owned(),
        (tens, 0) => TENS[tens].to_owned(),
        (tens, ones) => format!("{}-{}", TENS[tens], ONES[ones]),
    }
}

/// `fifteenth`, `thirty-first`: the days of a month.
fn ordinal(day: usize) -> String {
    match (day / 10, day % 10) {
        (0 | 1, _) => ORDINALS[day].to_owned(),
        (2, 0) => "twentieth".to_owned(),
        (_, 0) => "thirtieth".to_owned(),
        (tens, ones) => format!("{}-{}", TENS[tens], ORDINALS[ones]),
    }
}

/// `1st`, `2nd`, `13th`.
fn numbered(day: usize) -> String {
    let ending = match (day / 10, day % 10) {
        (1, _) => "th",
        (_, 1) => "st",
        (_, 2) => "nd",
        (_, 3) => "rd",
        _ => "th",
    };
    format!("{day}{ending}")
}

/// `二十五`: below a hundred.
fn han(number: usize) -> String {
    let ones = if number.is_multiple_of(10) { String::new() } else { HAN[number % 10].to_string() };
    match number / 10 {
        0 => ones,
        1 => format!("十{ones}"),
        tens => format!("{}十{ones}", HAN[tens]),
    }
}

impl Date {
    /// 0 is Monday. 1 January of the year 1 is a Monday.
    fn weekday(self) -> usize {
        let before = self.year - 1;
        let leaps = before / 4 - before / 100 + before / 400;
        let in_year: usize = (1..self.month).map(|month| days(self.year, month)).sum();
        (before * 365 + leaps + in_year + self.day - 1) % 7
    }

    /// `nineteen eighty-four`, `two thousand and six`.
    fn year_in_words(self, draws: &mut Draws) -> String {
        let (century, rest) = (self.year / 100, self.year % 100);
        match (century, rest) {
            (20, 0) => "two thousand".to_owned(),
            (20, 1..=9) => format!("two thousand {}{}", draws.pick(&["", "and "]), ONES[rest]),
            (_, 0) => format!("{} hundred", words(century)),
            (_, 1..=9) => format!("{} oh {}", words(century), ONES[rest]),
            _ => format!("{} {}", words(century), words(rest)),
        }
    }

    fn english(self, draws: &mut Draws) -> String {
        let Date { year, day, .. } = self;
        let (long, long_weekday) = (MONTHS[self.month - 1], WEEKDAYS[self.weekday()]);
        let short = &long[..3];
        let month = draws.pick(&[long, long, short]);
        let (ordinal, numbered) = (ordinal(day), numbered(day));
        let text = match draws.below(12) {
            0 => format!("{month} {day}, {year}"),
            1 => format!("{month} {numbered}, {year}"),
            2 => format!("{day} {month} {year}"),
            3 => format!("the {numbered} of {long}{} {year}", draws.pick(&["", ","])),
            4 => format!("the {ordinal} of {long}, {year}"),
            5 => format!("{long} the {ordinal}, {year}"),
            6 => format!("the {ordinal} of {long}, {}", self.year_in_words(draws)),
            7 => format!("{long} {ordinal}, {}", self.year_in_words(draws)),
            8 => format!("{day}-{short}-{year}"),
            9 => format!("{short}{} {day} {year}", draws.pick(&["", "."])),
            10 => format!("{year} {month} {day}"),
            _ => {
                let sign = draws.pick(&["/", "."]);
                return match draws.below(2) {
                    0 => format!("{year}{sign}{}{sign}{day}", self.month),
                    _ => format!("{year}{sign}{:02}{sign}{day:02}", self.month),
                };
            }
        };
        let text = match draws.below(4) {
            0 => format!("{long_weekday}, {text}"),
            1 if draws.below(2) == 0 => format!("{} {text}", &long_weekday[..3]),
            _ => text,
        };
        match draws.below(8) {
            0 => text.to_lowercase(),
            1 => text.to_uppercase(),
            2 if text.starts_with("the ") => text.replacen("the", "The", 1),
            _ => text,
        }
    }

    fn chinese(self, draws: &mut Draws) -> String {
        let Date { year, month, day } = self;
        let end = draws.pick(&["日", "日", "号"]);
        let text = match draws.below(5) {
            0 | 1 => format!("{year}年{month}月{day}{end}"),
            2 => format!("{year}年{month:02}月{day:02}{end}"),
            3 => format!("{year} 年 {month} 月 {day} {end}"),
            _ => {
                let zero = if draws.below(2) == 0 { '〇' } else { '零' };
                let digits = year.to_string();
                let digits = digits.bytes().map(|b| if b == b'0' { zero } else { HAN[usize::from(b - b'0')] });
                format!("{}年{}月{}{end}", digits.collect::<String>(), han(month), han(day))
            }
        };
        let weekday = HAN_WEEKDAYS[self.weekday()];
        let weekday = match (draws.pick(&["星期", "星期", "周", "礼拜"]), weekday) {
            ("礼拜", '日') => "礼拜天".to_owned(),
            ("星期", '日') => draws.pick(&["星期日", "星期天"]).to_owned(),
            (name, weekday) => format!("{name}{weekday}"),
        };
        match draws.below(8) {
            0 => format!("{text}，{weekday}"),
            1 => format!("{text}（{weekday}）"),
            2 => format!("{text}{weekday}"),
            3 => format!("{weekday}，{text}"),
            4 => format!("公元{text}"),
            _ => text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weekdays_are_those_of_the_calendar() {
        let weekday = |year, month, day| WEEKDAYS[Date { year, month, day }.weekday()];
        assert_eq!(weekday(2026, 11, 15), "Sunday");
        assert_eq!(weekday(2000, 2, 29), "Tuesday");
        assert_eq!(weekday(1900, 1, 1), "Monday");
        assert_eq!(weekday(1969, 7, 20), "Sunday");
        assert_eq!(weekday(2099, 12, 31), "Thursday");
    }

    #[test]
    fn numbers_are_spelled_as_people_spell_them() {
        assert_eq!(
            [1, 12, 20, 21, 30, 31].map(ordinal).join(" "),
            "first twelfth twentieth twenty-first thirtieth thirty-first"
        );
        assert_eq!(
            [1, 2, 3, 4, 11, 12, 13, 21, 22, 23].map(numbered).join(" "),
            "1st 2nd 3rd 4th 11th 12th 13th 21st 22nd 23rd"
        );
        assert_eq!([1, 10, 11, 20, 25, 31].map(han).join(" "), "一 十 十一 二十 二十五 三十一");
        let year = |year| Date { year, month: 1, day: 1 }.year_in_words(&mut Draws::new(0, [0; 3]));
        let years = [1900, 1905, 1984, 2000, 2010, 2026].map(year).join(", ");
        assert_eq!(
            years,
            "nineteen hundred, nineteen oh five, nineteen eighty-four, two thousand, twenty ten, twenty twenty-six"
        );
    }

    /// The numbers in a text.
    fn numbers(text: &str) -> Vec<usize> {
        let parts = text.split(|c: char| !c.is_ascii_digit()).filter(|part| !part.is_empty());
        parts.map(|part| part.parse().expect("digits")).collect()
    }

    #[test]
    fn the_ordinary_forms_all_occur_and_say_what_their_target_says() {
        let mut draws = Draws::new(11, [0; 3]);
        let pairs: Vec<Pair> = (0..20_000).map(|_| pair(&mut draws)).collect();
        for Pair { source, target } in &pairs {
            let iso = numbers(target);
            assert_eq!((iso.len(), target.len()), (3, 10), "{target}");
            assert!(iso[2] <= days(iso[0], iso[1]));
            let said = numbers(source);
            if said.len() == 3 && said[0] > 31 {
                assert_eq!(said, iso, "{source}");
            } else if let [day, year] = said[..]
                && source.is_ascii()
            {
                assert!(iso.contains(&day) && iso[0].max(iso[2]) == year.max(day), "{source}");
            }
            let weekday = Date { year: iso[0], month: iso[1], day: iso[2] }.weekday();
            for (at, name) in WEEKDAYS.iter().enumerate().filter(|(at, _)| *at != weekday) {
                assert!(!source.contains(name) && !source.contains(&format!("星期{}", HAN_WEEKDAYS[at])), "{source}");
            }
        }
        let some = |test: &dyn Fn(&str) -> bool| assert!(pairs.iter().any(|pair| test(&pair.source)));
        for part in [
            "th, ",
            "the fif",
            " oh ",
            "Sunday, ",
            "Sep. ",
            "-Jan-",
            "/",
            "礼拜天",
            "星期",
            "周",
            "零",
            "〇",
            "号",
            "公元",
            " 年 ",
        ] {
            some(&|source| source.contains(part));
        }
        some(&|source| source.chars().all(|c| !c.is_lowercase()) && source.contains("NOV"));
    }
}
