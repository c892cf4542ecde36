// The setting --output of farhand-broker doctor and farhand-agent doctor.
import * as z from 'zod';

export const outputFormat = {
  output: {
    schema: z.enum(['text', 'json']).default('text'),
    value: 'text|json',
    short: 'o',
    help: 'output format (default text)',
    flagOnly: true,
  },
};
