//! Bars with their spread, as SVG.

use super::{
    html::escape,
    sheet::{Bar, Chart, Kind},
};
use crate::stats::number;
use std::fmt::Write;

/// Draws `chart`. Its colours are those of the page that it stands in.
pub(super) fn draw(chart: &Chart) -> String {
    let height = TOP + chart.bars.len() as f64 * STEP;
    let scale = Scale::of(&chart.bars);
    let title = escape(chart.title);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{title}\">\n\
         <text class=\"title\" x=\"0\" y=\"18\">{title}</text>\n"
    );
    for (index, bar) in chart.bars.iter().enumerate() {
        draw_bar(&mut text, bar, TOP + index as f64 * STEP, scale);
    }
    text.push_str("</svg>\n");
    text
}

fn draw_bar(text: &mut String, bar: &Bar, top: f64, scale: Scale) {
    let [value, low, high] = [bar.value, bar.low, bar.high].map(|value| scale.width(value));
    let (middle, baseline) = (top + THICK / 2.0, top + THICK / 2.0 + 5.0);
    let (name, colour) = (escape(&bar.name), class(bar.kind));
    let (from, to) = (LEFT + low, LEFT + high);
    let label = LEFT + value.max(high) + 8.0;
    let _ = writeln!(
        text,
        "<text x=\"{:.1}\" y=\"{baseline:.1}\" text-anchor=\"end\">{name}</text>\
         <rect class=\"{colour}\" x=\"{LEFT}\" y=\"{top:.1}\" width=\"{value:.1}\" height=\"{THICK}\"/>\
         <path class=\"spread\" d=\"M{from:.1} {middle:.1}H{to:.1}M{from:.1} {:.1}v8M{to:.1} {:.1}v8\"/>\
         <text x=\"{label:.1}\" y=\"{baseline:.1}\">{}</text>",
        LEFT - 8.0,
        middle - 4.0,
        middle - 4.0,
        number(bar.value)
    );
}

/// The class of a bar, which the page gives a colour.
pub(super) fn class(kind: Kind) -> &'static str {
    match kind {
        Kind::Ours => "ours",
        Kind::Encrypted => "encrypted",
        Kind::Plain => "plain",
    }
}

/// How wide a value is.
#[derive(Debug, Clone, Copy)]
struct Scale {
    most: f64,
}

impl Scale {
    /// The largest value gets the whole width. A spread that goes far beyond all values is cut at their double, so that
    /// one outlier does not make all others small.
    fn of(bars: &[Bar]) -> Self {
        let most_of = |value: fn(&Bar) -> f64| bars.iter().map(value).fold(0.0, f64::max);
        let most = most_of(|bar| bar.high).min(2.0 * most_of(|bar| bar.value));
        Self { most: if most > 0.0 { most } else { 1.0 } }
    }

    fn width(self, value: f64) -> f64 {
        (value / self.most).clamp(0.0, 1.0) * (WIDTH - LEFT - RIGHT)
    }
}

// In the units of the drawing, which the page scales to its width.
const WIDTH: f64 = 760.0;
const LEFT: f64 = 190.0;
const RIGHT: f64 = 70.0;
const TOP: f64 = 32.0;
const STEP: f64 = 26.0;
const THICK: f64 = 18.0;

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(name: &str, value: f64, high: f64) -> Bar {
        Bar { name: name.into(), kind: Kind::Plain, value, low: value / 2.0, high }
    }

    #[test]
    fn the_longest_bar_fills_the_width() {
        let text = draw(&Chart { title: "GB/s", bars: vec![bar("a<b>", 2.0, 2.0), bar("c", 1.0, 1.0)] });
        assert!(text.contains("a&lt;b&gt;") && !text.contains("<b>"), "{text}");
        assert!(text.contains("width=\"500.0\"") && text.contains("width=\"250.0\""), "{text}");
        assert!(text.contains("M440.0 41.0H690.0"), "the spread, from half to all: {text}");
    }

    #[test]
    fn outliers_do_not_make_the_rest_small() {
        assert_eq!(Scale::of(&[bar("a", 1.0, 900.0)]).width(1.0), 250.0);
        assert_eq!(Scale::of(&[bar("a", 1.0, 900.0)]).width(900.0), 500.0);
        assert_eq!(Scale::of(&[bar("a", 0.0, 0.0)]).width(0.0), 0.0, "zeros are no bars");
    }
}
