//! Fuzz input read as a script: small numbers that steer, and raw bytes. Its end is read as zeros.

pub struct Script<'a>(pub &'a [u8]);

impl<'a> Script<'a> {
    pub fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// So many bytes, or what is left.
    pub fn bytes(&mut self, n: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        head
    }

    /// Mostly a small number, sometimes one at an edge, sometimes any.
    pub fn number(&mut self) -> u64 {
        match self.byte() {
            small @ 0..=239 => u64::from(small),
            240..=246 => self.u64(),
            247 => u64::from(u32::MAX),
            248 => 1 << 32,
            249 => 1 << 62,
            250 => (1 << 63) - 1,
            251 => 1 << 63,
            252 => u64::MAX - 1,
            253 => u64::MAX - 64,
            254 => u64::MAX - 7,
            255 => u64::MAX,
        }
    }
}
