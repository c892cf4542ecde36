// The setting --output of the verbs doctor and status of farhand-broker and farhand-agent.
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
