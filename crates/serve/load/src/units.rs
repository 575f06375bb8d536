//! Sizes, times and lists as fio writes them.

use std::time::Duration;

/// Parses a size: `4096`, `4k`, `4kb`, `1m`, `0x1000`. As in fio with its default `kb_base` of
/// 1024, `k` is 1024; `4KiB` is refused, as fio then takes it for 4000.
///
/// # Errors
/// What is wrong, as text.
pub fn bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let (digits, radix) = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(hex) => (hex, 16),
        None => (text, 10),
    };
    let is_digit = |c: char| if radix == 16 { c.is_ascii_hexdigit() } else { c.is_ascii_digit() };
    let end = digits.find(|c| !is_digit(c)).unwrap_or(digits.len());
    let (digits, suffix) = digits.split_at(end);
    let bad = || format!("{text:?} is not a size: use a number of bytes, or of k, m, g, t, p");
    let number = u64::from_str_radix(digits, radix).map_err(|_| bad())?;
    let power = match suffix.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" => 1,
        "m" | "mb" => 2,
        "g" | "gb" => 3,
        "t" | "tb" => 4,
        "p" | "pb" => 5,
        "kib" | "mib" | "gib" | "tib" | "pib" | "ki" | "mi" | "gi" | "ti" | "pi" => {
            let short = suffix[..1].to_ascii_lowercase();
            return Err(format!(
                "{text:?}: fio takes {suffix} for powers of 1000 (kb_base=1024); write {digits}{short}"
            ));
        }
        _ => return Err(bad()),
    };
    number.checked_mul(1024u64.pow(power)).ok_or_else(|| format!("{text:?} is too large"))
}

/// Parses a time: `30`, `30s`, `500ms`, `2m`, `1h`, `1d`, `10us`. A bare number is in `unit`.
///
/// # Errors
/// What is wrong, as text.
pub fn time(text: &str, unit: Duration) -> Result<Duration, String> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, suffix) = text.split_at(end);
    let bad = || format!("{text:?} is not a time: use a number of s, or of us, ms, m, h, d");
    let number: u32 = digits.parse().map_err(|_| bad())?;
    let unit = match suffix.to_ascii_lowercase().as_str() {
        "" => unit,
        "us" | "usec" => Duration::from_micros(1),
        "ms" | "msec" => Duration::from_millis(1),
        "s" | "sec" => Duration::from_secs(1),
        "m" => Duration::from_secs(60),
        "h" => Duration::from_secs(3600),
        "d" => Duration::from_secs(86_400),
        _ => return Err(bad()),
    };
    /// Long enough for any use, and short enough to be added to any clock.
    const LONGEST: Duration = Duration::from_secs(366 * 86_400);
    unit.checked_mul(number)
        .filter(|time| *time <= LONGEST)
        .ok_or_else(|| format!("{text:?} is longer than a year"))
}

/// Parses a number in a range.
///
/// # Errors
/// What is wrong, as text.
pub fn number(text: &str, least: u64, most: u64) -> Result<u64, String> {
    let number = bytes(text).map_err(|_| format!("{text:?} is not a number"))?;
    if (least..=most).contains(&number) {
        Ok(number)
    } else {
        Err(format!("{number} is not between {least} and {most}"))
    }
}

/// Parses `1` or `0`.
///
/// # Errors
/// What is wrong, as text.
pub fn flag(text: &str) -> Result<bool, String> {
    match text.trim() {
        "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        other => Err(format!("{other:?} is neither 1 nor 0")),
    }
}

/// Parses one to three values for reads, writes and trims; an omitted one equals the one before it.
///
/// # Errors
/// What is wrong, as text.
pub fn per_direction<T: Copy>(
    text: &str,
    before: [T; 3],
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<[T; 3], String> {
    let parts: Vec<&str> = text.split(',').map(str::trim).collect();
    if parts.len() > 3 {
        return Err(format!("{text:?} has more than three values: for reads, writes and trims"));
    }
    let mut out = before;
    let mut last = None;
    for (i, place) in out.iter_mut().enumerate() {
        match (parts.get(i), last) {
            // `8k,` leaves writes unchanged.
            (Some(&""), _) => {}
            (Some(part), _) => {
                *place = read(part)?;
                last = Some(*place);
            }
            (None, Some(value)) if !parts.contains(&"") => *place = value,
            (None, _) => {}
        }
    }
    Ok(out)
}

/// Formats a number of bytes.
#[must_use]
pub fn format_bytes(bytes: u64) -> String {
    let units = [(1u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.iter().find(|(unit, _)| bytes >= *unit && bytes.is_multiple_of(*unit)) {
        Some((unit, name)) => format!("{} {name}", bytes / unit),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As fio 3.33 reads them (`--showcmd`), except the last group, which it misreads.
    #[test]
    fn sizes_parse_as_in_fio() {
        for (text, expected) in
            [("512", 512), ("4k", 4096), ("4K", 4096), ("4kb", 4096), ("1m", 1 << 20), ("0x10", 16)]
        {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        assert_eq!(bytes("2g"), Ok(2 << 30));
        for bad in ["", "k", "4x", "-4k", "99999999999g", "4 k", "0x", "18446744073709551616"] {
            bytes(bad).expect_err(bad);
        }
        assert!(bytes("4KiB").expect_err("refused").contains("write 4k"));
    }

    #[test]
    fn times_parse_as_in_fio() {
        let second = Duration::from_secs(1);
        for (text, expected) in [
            ("10", Duration::from_secs(10)),
            ("500ms", Duration::from_millis(500)),
            ("2m", Duration::from_secs(120)),
            ("1d", Duration::from_secs(86_400)),
        ] {
            assert_eq!(time(text, second), Ok(expected), "{text}");
        }
        for bad in ["", "s", "1.5s", "1w", "4294967295d"] {
            time(bad, second).expect_err(bad);
        }
    }

    #[test]
    fn three_directions_are_distinguished() {
        let read = |text: &str| bytes(text);
        assert_eq!(per_direction("4k", [1; 3], read), Ok([4096; 3]));
        assert_eq!(per_direction("4k,8k", [1; 3], read), Ok([4096, 8192, 8192]));
        assert_eq!(per_direction("4k,", [1; 3], read), Ok([4096, 1, 1]));
        assert_eq!(per_direction(",8k", [1; 3], read), Ok([1, 8192, 1]));
        assert_eq!(per_direction("1,2,3", [1; 3], read), Ok([1, 2, 3]));
        per_direction("1,2,3,4", [1; 3], read).expect_err("four");
    }
}
